// SPDX-License-Identifier: Apache-2.0
/*
 * A load of connections, and the server that answers it.
 *
 *	load connect|crr|rr|udp [-n COUNT | -t SECONDS] [-w COUNT] [-s SEED] [-c] < targets
 *	load churn              [-n COUNT | -t SECONDS] [-r RATE] [-s SEED] [-c] < targets
 *	load hold               -n COUNT [-r RATE] [-s SEED] [-c] < targets
 *	load serve -p PORT
 *
 * Targets are lines "ADDRESS PORT" of either family; each connection goes to one of them at random.
 * A line "-" begins another list: connections take turns among the lists, so that what disturbs the
 * machine disturbs all of them alike. One thread, one connection at a time: the next begins when
 *the last is over.
 *
 *	connect	time of connect() over TCP
 *	crr	time from connect() to the answer to one byte
 *	rr	time from one byte to its answer, on connections that stay open, some to each list
 *	udp	time from a datagram to its answer, from a socket without a peer; -c: from one with
 *	churn	as crr, but no error stops it: they are counted; -c: connect only; -r: so many begin
 *		each second, or as many as go. SIGTERM ends it
 *	hold	opens connections, with a byte there and back on each, says so, and asks each once
 *		more after SIGTERM; -c: asks all the time, -r times a second, one after another
 *
 * The first four write one unsigned 64-bit number of nanoseconds for each sample, in the machine's
 * byte order, after -w samples that are not counted; the first error ends them with status 1. Churn
 * writes one JSON object, hold two: once all are open, and at its end. Sockets close with a reset,
 *so that no port waits in TIME_WAIT.
 *
 * The server answers a byte 'w' with the address it was reached at, any other with itself. Several
 *may share a port, since one process may have no more than so many files.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <inttypes.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define MAX_ERRNO	160
#define MAX_LISTS	8
#define BACKLOG		65535
#define EVENTS		256
#define KEPT_ALIVE	16 /* connections of rr to each list */
#define TIMEOUT_SECONDS 5
#define SLOW_NS		500000000 /* a packet was lost on the way: RFC 6298's first time-out is 1 s */

union address {
	struct sockaddr any;
	struct sockaddr_in v4;
	struct sockaddr_in6 v6;
};

struct targets {
	union address *all;
	size_t count;
	size_t lists;
	size_t ends[MAX_LISTS]; /* of each list, in `all` */
};

struct options {
	uint64_t count;
	uint64_t warm_up;
	uint64_t seed;
	double seconds;
	double rate;
	bool connected;
	uint16_t port;
};

static volatile sig_atomic_t stopped;

static void stop(int number)
{
	(void)number;
	stopped = 1;
}

static void die(const char *what)
{
	fprintf(stderr, "load: %s: %s\n", what, strerror(errno));
	exit(1);
}

static uint64_t now(void)
{
	struct timespec moment;

	clock_gettime(CLOCK_MONOTONIC, &moment);
	return (uint64_t)moment.tv_sec * 1000000000 + (uint64_t)moment.tv_nsec;
}

/* xorshift64*; the state is never 0. */
static uint64_t random_number(uint64_t *state)
{
	*state ^= *state >> 12;
	*state ^= *state << 25;
	*state ^= *state >> 27;
	return *state * 0x2545f4914f6cdd1d;
}

static socklen_t length_of(const union address *address)
{
	return address->any.sa_family == AF_INET ? sizeof(address->v4) : sizeof(address->v6);
}

static bool parse_target(const char *text, uint16_t port, union address *target)
{
	memset(target, 0, sizeof(*target));
	if (inet_pton(AF_INET, text, &target->v4.sin_addr) == 1) {
		target->v4.sin_family = AF_INET;
		target->v4.sin_port = htons(port);
		return true;
	}
	target->v6.sin6_family = AF_INET6;
	target->v6.sin6_port = htons(port);
	return inet_pton(AF_INET6, text, &target->v6.sin6_addr) == 1;
}

static void end_list(struct targets *targets)
{
	size_t start = targets->lists ? targets->ends[targets->lists - 1] : 0;

	if (targets->count == start || targets->lists == MAX_LISTS) {
		fprintf(stderr, "load: a list without targets, or more than %d lists\n", MAX_LISTS);
		exit(2);
	}
	targets->ends[targets->lists++] = targets->count;
}

static struct targets read_targets(FILE *stream)
{
	struct targets targets = {0};
	char line[80], text[INET6_ADDRSTRLEN];
	uint16_t port;

	while (fgets(line, sizeof(line), stream)) {
		if (!strcmp(line, "-\n")) {
			end_list(&targets);
			continue;
		}
		targets.all = realloc(targets.all, (targets.count + 1) * sizeof(*targets.all));
		if (!targets.all)
			die("targets");
		if (sscanf(line, "%45s %" SCNu16, text, &port) != 2 ||
		    !parse_target(text, port, &targets.all[targets.count++])) {
			fprintf(stderr, "load: no target: %s", line);
			exit(2);
		}
	}
	end_list(&targets);
	return targets;
}

/* A random one of the list whose turn it is. */
static const union address *pick(const struct targets *targets, uint64_t turn, uint64_t *state)
{
	size_t list = turn % targets->lists;
	size_t start = list ? targets->ends[list - 1] : 0;

	return &targets->all[start + random_number(state) % (targets->ends[list] - start)];
}

static void set_timeouts(int fd)
{
	struct timeval patience = {.tv_sec = TIMEOUT_SECONDS};

	setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience));
	setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
}

/* A time-out of connect() shows as EINPROGRESS, of recv() as EAGAIN. */
static int errno_of_failure(void)
{
	return errno == EINPROGRESS || errno == EAGAIN ? ETIMEDOUT : errno;
}

static int exchange(int fd)
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

/* A TCP socket for the target, not connected yet; negative: errno says why there is none. */
static int stream(const union address *target)
{
	const struct linger reset = {.l_onoff = 1, .l_linger = 0};
	int fd = socket(target->any.sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);

	if (fd < 0)
		return fd;
	setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof(reset));
	set_timeouts(fd);
	return fd;
}

/* One TCP connection. Returns 0 or an errno; *took is only set with 0. */
static int tcp_once(const union address *target, bool with_exchange, uint64_t *took)
{
	int fd = stream(target);
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

static int udp_with_peer(const union address *target, uint64_t *took)
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

/* The answer has to come from the address that was asked: EADDRNOTAVAIL where it does not. */
static int udp_without_peer(const union address *target, uint64_t *took)
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

/* A connection over which a byte went there and back. Returns 0 or an errno. */
static int open_kept(const union address *target, int *fd)
{
	const int yes = 1;
	int error;

	*fd = stream(target);
	if (*fd < 0)
		return errno;
	setsockopt(*fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes));
	error = connect(*fd, &target->any, length_of(target)) ? errno_of_failure() : exchange(*fd);
	if (error)
		close(*fd);
	return error;
}

static int once(const char *mode, const struct options *options, const union address *target,
		uint64_t *took)
{
	if (!strcmp(mode, "udp"))
		return options->connected ? udp_with_peer(target, took)
					  : udp_without_peer(target, took);
	if (!strcmp(mode, "churn"))
		return tcp_once(target, !options->connected, took);
	return tcp_once(target, !strcmp(mode, "crr"), took);
}

static void explain(const union address *target, int error)
{
	char text[INET6_ADDRSTRLEN];
	const void *raw = target->any.sa_family == AF_INET ? (const void *)&target->v4.sin_addr
							   : (const void *)&target->v6.sin6_addr;

	inet_ntop(target->any.sa_family, raw, text, sizeof(text));
	fprintf(stderr, "load: %s port %u: %s\n", text, ntohs(target->v4.sin_port),
		strerror(error));
}

static bool over(const struct options *options, uint64_t done, uint64_t start)
{
	if (stopped)
		return true;
	if (options->count && done >= options->count)
		return true;
	return options->seconds > 0 && (double)(now() - start) >= options->seconds * 1e9;
}

static void write_sample(uint64_t took)
{
	if (fwrite(&took, sizeof(took), 1, stdout) != 1)
		die("standard output");
}

static int keep_alive(const struct options *options, const struct targets *targets)
{
	size_t count = targets->lists * KEPT_ALIVE;
	int *fds = calloc(count, sizeof(*fds));
	uint64_t state = options->seed, start, done = 0;

	for (size_t i = 0; i < count; i++) { /* those of one list are `lists` apart */
		const union address *target = pick(targets, i, &state);
		int error = fds ? open_kept(target, &fds[i]) : ENOMEM;

		if (error) {
			explain(target, error);
			return 1;
		}
	}
	start = now();
	for (uint64_t i = 0; !over(options, done, start); i++) {
		uint64_t began = now();
		int error = exchange(fds[i % count]);

		if (error) {
			fprintf(stderr, "load: a kept connection: %s\n", strerror(error));
			return 1;
		}
		if (i < options->warm_up)
			continue;
		done++;
		write_sample(now() - began);
	}
	return fflush(stdout) ? 1 : 0;
}

static int measure(const char *mode, const struct options *options, const struct targets *targets)
{
	uint64_t state = options->seed, start = now(), done = 0, took;

	for (uint64_t i = 0; !over(options, done, start); i++) {
		const union address *target = pick(targets, i, &state);
		int error = once(mode, options, target, &took);

		if (error) {
			explain(target, error);
			return 1;
		}
		if (i < options->warm_up)
			continue;
		done++;
		write_sample(took);
	}
	return fflush(stdout) ? 1 : 0;
}

/* Until the moment at which, at `rate` a second, number `turn` is due; at once where that is over,
 * or with no rate.
 */
static void await_turn(double rate, uint64_t start, uint64_t turn)
{
	uint64_t due;
	struct timespec moment;

	if (rate <= 0)
		return;
	due = start + (uint64_t)((double)turn / rate * 1e9);
	moment.tv_sec = (time_t)(due / 1000000000);
	moment.tv_nsec = (long)(due % 1000000000);
	clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &moment, NULL);
}

static void write_errors(const uint64_t errors[MAX_ERRNO])
{
	const char *comma = "";

	printf("\"errors\":{");
	for (int number = 0; number < MAX_ERRNO; number++) {
		if (!errors[number])
			continue;
		printf("%s\"%s\":%" PRIu64, comma, strerrorname_np(number), errors[number]);
		comma = ",";
	}
	printf("}}\n");
	fflush(stdout);
}

static int churn(const struct options *options, const struct targets *targets)
{
	uint64_t state = options->seed, start = now(), done = 0, failed = 0, slowest = 0, slow = 0,
		 took;
	uint64_t errors[MAX_ERRNO] = {0};

	for (; !over(options, done, start); done++) {
		const union address *target = pick(targets, done, &state);
		int error;

		await_turn(options->rate, start, done);
		error = once("churn", options, target, &took);

		if (error == EINTR && stopped)
			break; /* it was the signal, not the network */
		if (error && error < MAX_ERRNO) {
			errors[error]++;
			failed++;
			continue;
		}
		slow += took >= SLOW_NS;
		if (took > slowest)
			slowest = took;
	}
	printf("{\"attempts\":%" PRIu64 ",\"failed\":%" PRIu64 ",\"seconds\":%.3f", done, failed,
	       (double)(now() - start) / 1e9);
	printf(",\"slowest_us\":%.1f,\"slow\":%" PRIu64 ",", (double)slowest / 1e3, slow);
	write_errors(errors);
	return 0;
}

/* As many files as may be. */
static void raise_file_limit(void)
{
	struct rlimit limit;

	if (!getrlimit(RLIMIT_NOFILE, &limit)) {
		limit.rlim_cur = limit.rlim_max;
		setrlimit(RLIMIT_NOFILE, &limit);
	}
}

struct held {
	int *fds; /* negative: it failed */
	uint64_t count;
	uint64_t failed;
	uint64_t errors[MAX_ERRNO];
};

static void failed(struct held *held, uint64_t index, int error)
{
	held->fds[index] = -1;
	held->failed++;
	held->errors[error < MAX_ERRNO ? error : EIO]++;
}

static void open_all(struct held *held, const struct options *options,
		     const struct targets *targets)
{
	uint64_t state = options->seed;

	for (uint64_t i = 0; i < held->count; i++) {
		int error = open_kept(pick(targets, i, &state), &held->fds[i]);

		if (error)
			failed(held, i, error);
	}
}

static void ask(struct held *held, uint64_t index)
{
	int error;

	if (held->fds[index] < 0)
		return;
	error = exchange(held->fds[index]);
	if (error) {
		close(held->fds[index]);
		failed(held, index, error);
	}
}

static void tell(struct held *held, uint64_t exchanges, uint64_t start)
{
	printf("{\"attempts\":%" PRIu64 ",\"failed\":%" PRIu64 ",\"seconds\":%.3f,", exchanges,
	       held->failed, (double)(now() - start) / 1e9);
	write_errors(held->errors);
}

/* SIGTERM is awaited, and does not interrupt: what fails was no signal's doing. */
static int hold(const struct options *options, const struct targets *targets)
{
	struct held held = {.count = options->count};
	const struct timespec at_once = {0};
	uint64_t start = now(), exchanges = 0;
	sigset_t ends;

	sigemptyset(&ends);
	sigaddset(&ends, SIGTERM);
	sigprocmask(SIG_BLOCK, &ends, NULL);
	raise_file_limit();
	held.fds = calloc(held.count ? held.count : 1, sizeof(*held.fds));
	if (!held.fds)
		die("connections");
	open_all(&held, options, targets);
	tell(&held, held.count, start);
	start = now();
	if (options->connected) {
		for (; sigtimedwait(&ends, NULL, &at_once) < 0 && held.count; exchanges++) {
			await_turn(options->rate, start, exchanges);
			ask(&held, exchanges % held.count);
		}
	} else {
		sigwaitinfo(&ends, NULL);
		start = now();
	}
	for (uint64_t i = 0; i < held.count; i++, exchanges++)
		ask(&held, i);
	tell(&held, exchanges, start);
	return 0;
}

/* A socket of IPv6 that takes IPv4, too. */
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

/* Returns whether the connection lives on. */
static bool answer(int fd)
{
	char text[INET6_ADDRSTRLEN];
	ssize_t got = recv(fd, text, 1, MSG_DONTWAIT);
	size_t length = 1;

	if (got < 0)
		return errno == EAGAIN || errno == EINTR;
	if (!got)
		return false;
	if (text[0] == 'w')
		length = own_address(fd, text, sizeof(text));
	return send(fd, text, length, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)length;
}

/* Back to where it came from, from the address it was sent to: the control message says both. */
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
		/* Most that only connect are gone by now: epoll need not learn of them. */
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

/* Writes a line once it answers; runs until it is ended. */
static int serve(uint16_t port)
{
	int listener = bound(SOCK_STREAM, port), datagrams = bound(SOCK_DGRAM, port);
	struct epoll_event events[EVENTS];
	int queue = epoll_create1(EPOLL_CLOEXEC);

	if (queue < 0 || listen(listener, BACKLOG))
		die("listen");
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

static struct options parse_options(int argc, char **argv)
{
	struct options options = {.seed = 88172645463325252};
	int option;

	while ((option = getopt(argc, argv, "n:t:w:s:p:r:c")) != -1) {
		if (option == 'n')
			options.count = strtoull(optarg, NULL, 10);
		else if (option == 't')
			options.seconds = strtod(optarg, NULL);
		else if (option == 'w')
			options.warm_up = strtoull(optarg, NULL, 10);
		else if (option == 's')
			options.seed ^= strtoull(optarg, NULL, 10) * 0x9e3779b97f4a7c15;
		else if (option == 'p')
			options.port = (uint16_t)strtoul(optarg, NULL, 10);
		else if (option == 'r')
			options.rate = strtod(optarg, NULL);
		else if (option == 'c')
			options.connected = true;
		else
			exit(2);
	}
	if (!options.seed)
		options.seed = 1;
	return options;
}

static const char *const MODES[] = {"connect", "crr", "rr", "udp", "churn", "hold", "serve"};

static const char *parse_mode(const char *text)
{
	for (size_t i = 0; text && i < sizeof(MODES) / sizeof(*MODES); i++)
		if (!strcmp(text, MODES[i]))
			return MODES[i];
	fprintf(stderr, "usage: load connect|crr|rr|udp|churn|hold|serve OPTIONS < targets\n");
	exit(2);
}

int main(int argc, char **argv)
{
	const char *mode = parse_mode(argc > 1 ? argv[1] : NULL);
	struct options options = parse_options(argc - 1, argv + 1);
	const struct sigaction action = {.sa_handler = stop};
	struct targets targets;

	sigaction(SIGTERM, &action, NULL);
	sigaction(SIGINT, &action, NULL);
	if (!strcmp(mode, "serve"))
		return serve(options.port);
	targets = read_targets(stdin);
	if (!strcmp(mode, "churn"))
		return churn(&options, &targets);
	if (!strcmp(mode, "hold"))
		return hold(&options, &targets);
	if (!strcmp(mode, "rr"))
		return keep_alive(&options, &targets);
	return measure(mode, &options, &targets);
}
