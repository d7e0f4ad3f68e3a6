// SPDX-License-Identifier: Apache-2.0
/* Mode serve: the server of all other modes. */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <signal.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "load.h"

#define BACKLOG 65535
#define EVENTS	256

/* Returns an IPv6 socket that is bound to the port and accepts IPv4 as well. */
static int bound(int type, uint16_t port)
{
	const union address any = {.v6 = {.sin6_family = AF_INET6, .sin6_port = htons(port)}};
	const int yes = 1, no = 0;
	int fd = socket(AF_INET6, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

	if (fd < 0)
		die("socket");
	setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
	setsockopt(fd, SOL_SOCKET, SO_REUSEPORT, &yes, sizeof(yes));
	setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof(no));
	setsockopt(fd, IPPROTO_IPV6, IPV6_RECVPKTINFO, &yes, sizeof(yes));
	if (bind(fd, &any.any, sizeof(any.v6)))
		die("bind");
	return fd;
}

/* Attaches a filter that drops datagrams which begin with UNANSWERED, so that they do not wake the
 * process. The filter sees the UDP header of 8 bytes before the payload.
 */
static void ignore_unanswered(int fd)
{
	struct sock_filter lines[] = {
	    BPF_STMT(BPF_LD | BPF_B | BPF_ABS, 8),
	    BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, UNANSWERED, 0, 1),
	    BPF_STMT(BPF_RET | BPF_K, 0),
	    BPF_STMT(BPF_RET | BPF_K, 0xffff),
	};
	const struct sock_fprog filter = {sizeof(lines) / sizeof(*lines), lines};

	if (setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, &filter, sizeof(filter)))
		die("a filter");
}

static void watch(int queue, int fd)
{
	struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};

	if (epoll_ctl(queue, EPOLL_CTL_ADD, fd, &event))
		die("epoll_ctl");
}

static size_t own_address(int fd, char *text, size_t size)
{
	union address own;
	socklen_t length = sizeof(own);

	if (getsockname(fd, &own.any, &length))
		return 0;
	if (IN6_IS_ADDR_V4MAPPED(&own.v6.sin6_addr))
		inet_ntop(AF_INET, &own.v6.sin6_addr.s6_addr[12], text, (socklen_t)size);
	else
		inet_ntop(AF_INET6, &own.v6.sin6_addr, text, (socklen_t)size);
	return strlen(text);
}

/* Prepares a child process for one blocking connection. It exits together with the server. */
void keep_only(int fd)
{
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	close_range(0, (unsigned int)fd - 1, 0);
	close_range((unsigned int)fd + 1, ~0U, 0);
	fcntl(fd, F_SETFL, 0);
}

/* Returns whether the connection stays open. */
static bool answer(int fd)
{
	char text[INET6_ADDRSTRLEN];
	ssize_t got = recv(fd, text, 1, MSG_DONTWAIT);
	size_t length = 1;

	if (got < 0)
		return errno == EAGAIN || errno == EINTR;
	if (!got)
		return false;
	if (text[0] == DOWNLOAD || text[0] == STREAM) {
		if (!fork())
			(text[0] == STREAM ? serve_stream : serve_download)(fd);
		return false;
	}
	if (text[0] == 'w')
		length = own_address(fd, text, sizeof(text));
	return send(fd, text, length, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)length;
}

/* Replies from the address that the datagram was sent to, which the control message contains. */
static void answer_datagram(int fd)
{
	union address from;
	char byte, control[CMSG_SPACE(sizeof(struct in6_pktinfo))];
	struct iovec part = {&byte, 1};
	struct msghdr message = {.msg_name = &from,
				 .msg_namelen = sizeof(from),
				 .msg_iov = &part,
				 .msg_iovlen = 1,
				 .msg_control = control,
				 .msg_controllen = sizeof(control)};
	struct cmsghdr *info;

	if (recvmsg(fd, &message, MSG_DONTWAIT) < 0)
		return;
	info = CMSG_FIRSTHDR(&message);
	if (info && info->cmsg_level == IPPROTO_IPV6 && info->cmsg_type == IPV6_PKTINFO)
		((struct in6_pktinfo *)CMSG_DATA(info))->ipi6_ifindex = 0;
	sendmsg(fd, &message, MSG_DONTWAIT);
}

static void accept_all(int queue, int listener)
{
	int fd;

	while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0) {
		/* Most clients that only connect have closed already and need no epoll entry. */
		if (answer(fd))
			watch(queue, fd);
		else
			close(fd);
	}
}

static void handle(int queue, int listener, int datagrams, int fd)
{
	if (fd == listener)
		accept_all(queue, listener);
	else if (fd == datagrams)
		answer_datagram(fd);
	else if (!answer(fd))
		close(fd);
}

/* Writes a line when it is ready, and runs until a signal ends it. */
int serve(uint16_t port)
{
	int listener = bound(SOCK_STREAM, port), datagrams = bound(SOCK_DGRAM, port);
	struct epoll_event events[EVENTS];
	int queue = epoll_create1(EPOLL_CLOEXEC);

	if (queue < 0 || listen(listener, BACKLOG))
		die("listen");
	signal(SIGCHLD, SIG_IGN); /* the children are downloads and streams; none is waited for */
	ignore_unanswered(datagrams);
	raise_file_limit();
	watch(queue, listener);
	watch(queue, datagrams);
	printf("ready\n");
	fflush(stdout);
	while (!stopped) {
		int count = epoll_wait(queue, events, EVENTS, -1);

		for (int i = 0; i < count; i++)
			handle(queue, listener, datagrams, events[i].data.fd);
	}
	return 0;
}
