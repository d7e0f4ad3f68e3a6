// SPDX-License-Identifier: Apache-2.0
/*
 * Client and server of modes put and get: one stream of a given size. The client sends the letter
 * STREAM and the number of bytes that it wants. The server sends them, reads to the end of the
 * client's stream, and sends a byte.
 */
#include <errno.h>
#include <stdbool.h>
#include <unistd.h>

#include "load.h"

#define CHUNK 131072

static char chunk[CHUNK];

static int send_bytes(int fd, uint64_t left)
{
	while (left) {
		ssize_t sent = send(fd, chunk, left < CHUNK ? left : CHUNK, MSG_NOSIGNAL);

		if (sent < 0)
			return errno_of_failure();
		left -= (uint64_t)sent;
	}
	return 0;
}

static int receive_bytes(int fd, uint64_t left)
{
	while (left) {
		ssize_t got = recv(fd, chunk, left < CHUNK ? left : CHUNK, 0);

		if (got <= 0)
			return got ? errno_of_failure() : ENODATA;
		left -= (uint64_t)got;
	}
	return 0;
}

/* Runs in a child process. */
void serve_stream(int fd)
{
	uint64_t wanted;
	ssize_t got = -1;

	keep_only(fd);
	if (recv(fd, &wanted, sizeof(wanted), MSG_WAITALL) == sizeof(wanted) &&
	    !send_bytes(fd, wanted))
		while ((got = recv(fd, chunk, sizeof(chunk), 0)) > 0)
			;
	if (!got)
		send(fd, chunk, 1, MSG_NOSIGNAL);
	_exit(0);
}

int stream_once(const union address *target, uint64_t size, bool get, uint64_t *took)
{
	struct {
		char letter;
		uint64_t wanted;
	} __attribute__((packed)) request = {STREAM, get ? size : 0};
	int fd = tcp_socket(target), error = 0;
	uint64_t start;

	if (fd < 0)
		return errno;
	if (connect(fd, &target->any, length_of(target)))
		error = errno_of_failure();
	start = now();
	if (!error && send(fd, &request, sizeof(request), MSG_NOSIGNAL) != sizeof(request))
		error = errno_of_failure();
	if (!error)
		error = get ? receive_bytes(fd, size) : send_bytes(fd, size);
	if (!error && shutdown(fd, SHUT_WR))
		error = errno;
	if (!error)
		error = receive_bytes(fd, 1);
	*took = now() - start;
	close(fd);
	return error;
}
