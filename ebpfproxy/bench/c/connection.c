// SPDX-License-Identifier: Apache-2.0
/* Opens, uses and closes single connections and sockets. */
#include <errno.h>
#include <netinet/tcp.h>
#include <string.h>
#include <sys/time.h>
#include <unistd.h>

#include "load.h"

#define TIMEOUT_SECONDS 5

static void set_timeouts(int fd)
{
	struct timeval timeout = {.tv_sec = TIMEOUT_SECONDS};

	setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof(timeout));
	setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
}

/* A timeout of connect() sets EINPROGRESS, a timeout of recv() sets EAGAIN. */
int errno_of_failure(void)
{
	return errno == EINPROGRESS || errno == EAGAIN ? ETIMEDOUT : errno;
}

int exchange(int fd)
{
	char byte = 'x';
	ssize_t got;

	if (send(fd, &byte, 1, MSG_NOSIGNAL) != 1)
		return errno_of_failure();
	got = recv(fd, &byte, 1, 0);
	if (got < 0)
		return errno_of_failure();
	return got ? 0 : ENODATA;
}

/* Returns an unconnected TCP socket for the target, or a negative number and sets errno. */
int tcp_socket(const union address *target)
{
	const struct linger reset = {.l_onoff = 1, .l_linger = 0};
	int fd = socket(target->any.sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);

	if (fd < 0)
		return fd;
	setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof(reset));
	set_timeouts(fd);
	return fd;
}

int tcp_once(const union address *target, bool with_exchange, uint64_t *took)
{
	int fd = tcp_socket(target);
	uint64_t start;
	int error = 0;

	if (fd < 0)
		return errno;
	start = now();
	if (connect(fd, &target->any, length_of(target)))
		error = errno_of_failure();
	else if (with_exchange)
		error = exchange(fd);
	*took = now() - start;
	close(fd);
	return error;
}

int udp_with_peer(const union address *target, uint64_t *took)
{
	int fd = socket(target->any.sa_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	uint64_t start;
	int error;

	if (fd < 0)
		return errno;
	set_timeouts(fd);
	start = now();
	error = connect(fd, &target->any, length_of(target)) ? errno : exchange(fd);
	*took = now() - start;
	close(fd);
	return error;
}

static bool same(const union address *one, const union address *other)
{
	if (one->any.sa_family != other->any.sa_family)
		return false;
	if (one->any.sa_family == AF_INET)
		return one->v4.sin_port == other->v4.sin_port &&
		       one->v4.sin_addr.s_addr == other->v4.sin_addr.s_addr;
	return one->v6.sin6_port == other->v6.sin6_port &&
	       !memcmp(&one->v6.sin6_addr, &other->v6.sin6_addr, sizeof(one->v6.sin6_addr));
}

/* Returns EADDRNOTAVAIL if the reply has another source address than the target. */
int udp_without_peer(const union address *target, uint64_t *took)
{
	static int sockets[2] = {-1, -1};
	int *fd = &sockets[target->any.sa_family == AF_INET6];
	union address from;
	socklen_t length = sizeof(from);
	uint64_t start;
	char byte = 'x';

	if (*fd < 0) {
		*fd = socket(target->any.sa_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
		if (*fd < 0)
			return errno;
		set_timeouts(*fd);
	}
	start = now();
	if (sendto(*fd, &byte, 1, 0, &target->any, length_of(target)) != 1)
		return errno;
	if (recvfrom(*fd, &byte, 1, 0, &from.any, &length) < 0)
		return errno_of_failure();
	*took = now() - start;
	return same(target, &from) ? 0 : EADDRNOTAVAIL;
}

int open_kept(const union address *target, int *fd)
{
	const int yes = 1;
	int error;

	*fd = tcp_socket(target);
	if (*fd < 0)
		return errno;
	setsockopt(*fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes));
	error = connect(*fd, &target->any, length_of(target)) ? errno_of_failure() : exchange(*fd);
	if (error)
		close(*fd);
	return error;
}

static int udp_socket(const union address *target)
{
	int fd = socket(target->any.sa_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);

	if (fd < 0)
		return fd;
	set_timeouts(fd);
	if (!connect(fd, &target->any, length_of(target)))
		return fd;
	close(fd);
	return -1;
}

int open_kept_udp(const union address *target, int *fd)
{
	int error;

	*fd = udp_socket(target);
	if (*fd < 0)
		return errno;
	error = exchange(*fd);
	if (error)
		close(*fd);
	return error;
}

int send_unanswered(int fd, uint64_t *took)
{
	const char byte = UNANSWERED;
	uint64_t start = now();

	if (send(fd, &byte, 1, MSG_NOSIGNAL) != 1)
		return errno_of_failure();
	*took = now() - start;
	return 0;
}

/* The exchange afterwards verifies that the flow reaches the server. */
int send_first(const union address *target, uint64_t *took)
{
	int fd = udp_socket(target);
	int error;

	if (fd < 0)
		return errno;
	error = send_unanswered(fd, took);
	if (!error)
		error = exchange(fd);
	close(fd);
	return error;
}
