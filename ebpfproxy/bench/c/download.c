// SPDX-License-Identifier: Apache-2.0
/*
 * Client and server of mode download. The server sends consecutive 64-bit numbers from 0 in the
 * machine's byte order, until the client sends another byte. Then it sends END and the count of the
 * numbers. The client thus detects lost, duplicated and changed data, and a premature end.
 */
#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "load.h"

#define END    UINT64_MAX
#define PIECE  2048 /* numbers in one read */
#define WRITES 8192 /* numbers in one write */

struct download {
	int fd;
	uint64_t count; /* of received numbers */
	uint64_t slowest;
	bool ended;
};

static void send_all(int fd, const void *data, size_t length)
{
	while (length) {
		ssize_t sent = send(fd, data, length, MSG_NOSIGNAL);

		if (sent < 0)
			_exit(1); /* the client detects the premature end */
		data = (const char *)data + sent;
		length -= (size_t)sent;
	}
}

/* Runs in a child process, which exits after the client has closed. */
void serve_download(int fd)
{
	static uint64_t numbers[WRITES];
	uint64_t end[2] = {END}, count = 0;
	char byte;

	keep_only(fd);
	while (recv(fd, &byte, 1, MSG_DONTWAIT) < 0 && errno == EAGAIN) {
		for (size_t i = 0; i < WRITES; i++)
			numbers[i] = count++;
		send_all(fd, numbers, sizeof(numbers));
	}
	end[1] = count;
	send_all(fd, end, sizeof(end));
	_exit(0);
}

/* Returns EBADMSG if the received numbers differ from those that were sent. */
static int check(struct download *download, const uint64_t *numbers, size_t length)
{
	for (size_t i = 0; i < length; i++) {
		if (numbers[i] == download->count) {
			download->count++;
			continue;
		}
		download->ended =
		    numbers[i] == END && i + 2 == length && numbers[i + 1] == download->count;
		return download->ended ? 0 : EBADMSG;
	}
	return 0;
}

/* Reads one piece or the end of the stream. Returns 0 or an errno: ENODATA if the stream ends early
 * or stalls.
 */
static int read_piece(struct download *download)
{
	uint64_t numbers[PIECE], start = now(), took;
	ssize_t got = recv(download->fd, numbers, sizeof(numbers), MSG_WAITALL);
	int error;

	if (got < 0)
		return errno_of_failure();
	took = now() - start;
	if (took > download->slowest)
		download->slowest = took;
	error = check(download, numbers, (size_t)got / sizeof(*numbers));
	if (!error && !download->ended && got != sizeof(numbers))
		return ENODATA;
	return error;
}

static int read_to_end(struct download *download)
{
	const char byte = DOWNLOAD;
	int error = 0;

	if (send(download->fd, &byte, 1, MSG_NOSIGNAL) != 1)
		return errno_of_failure();
	while (!error && !download->ended)
		error = read_piece(download);
	if (!error && recv(download->fd, &(char){0}, 1, 0))
		return EBADMSG;
	return error;
}

int download(const struct options *options, const struct targets *targets)
{
	struct download download = {0};
	const struct timespec at_once = {0};
	const char byte = DOWNLOAD;
	uint64_t state = options->seed, start = now(), errors[MAX_ERRNO] = {0};
	sigset_t ends;
	int error;

	block_sigterm(&ends);
	error = open_kept(pick(targets, 0, &state), &download.fd);
	if (!error && send(download.fd, &byte, 1, MSG_NOSIGNAL) != 1)
		error = errno_of_failure();
	for (uint64_t turn = 0; !error && sigtimedwait(&ends, NULL, &at_once) < 0; turn++) {
		await_turn(options->rate, start, turn);
		error = read_piece(&download);
	}
	if (!error)
		error = read_to_end(&download);
	if (error)
		errors[error < MAX_ERRNO ? error : EIO]++;
	printf("{\"attempts\":1,\"failed\":%d,\"seconds\":%.3f,\"bytes\":%" PRIu64
	       ",\"slowest_us\":%.1f,",
	       error != 0, (double)(now() - start) / 1e9, download.count * sizeof(uint64_t),
	       (double)download.slowest / 1e3);
	write_errors(errors);
	return 0;
}
