/* SPDX-License-Identifier: Apache-2.0 */
/* What the parts of the load share. `load.c` describes it. */
#ifndef LOAD_H
#define LOAD_H

#include <netinet/in.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/socket.h>

#define MAX_ERRNO  160
#define MAX_LISTS  8
#define UNANSWERED '-' /* a datagram that begins so is dropped where it arrives */
#define DOWNLOAD   'd' /* a stream that begins so is a download, until another byte comes */

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

extern volatile sig_atomic_t stopped; /* by SIGTERM or SIGINT */

void die(const char *what) __attribute__((noreturn));

/* targets.c */
struct targets read_targets(FILE *stream);
/* A random one of the list whose turn it is. */
const union address *pick(const struct targets *targets, uint64_t turn, uint64_t *state);
socklen_t length_of(const union address *address);
void explain(const union address *target, int error);

/* pace.c */
uint64_t now(void); /* nanoseconds */
bool over(const struct options *options, uint64_t done, uint64_t start);
/* Until the moment at which, at `rate` a second, number `turn` is due; at once where that is over,
 * or with no rate.
 */
void await_turn(double rate, uint64_t start, uint64_t turn);

/* connection.c: each returns 0 or an errno; *took is only set with 0. */
int tcp_once(const union address *target, bool with_exchange, uint64_t *took);
int udp_with_peer(const union address *target, uint64_t *took);
int udp_without_peer(const union address *target, uint64_t *took);
/* A connection over which a byte went there and back, or a socket for such datagrams. */
int open_kept(const union address *target, int *fd);
int open_kept_udp(const union address *target, int *fd);
int exchange(int fd);
/* A datagram that the server drops: the time of send() is that of its whole way. */
int send_unanswered(int fd, uint64_t *took);
int send_first(const union address *target, uint64_t *took);
int errno_of_failure(void);

/* What a mode does, to the exit status. */
int measure(const char *mode, const struct options *options, const struct targets *targets);
int keep_alive(const struct options *options, const struct targets *targets, bool datagrams);
int churn(const struct options *options, const struct targets *targets);
int hold(const struct options *options, const struct targets *targets);
int download(const struct options *options, const struct targets *targets);
int serve(uint16_t port);

void write_errors(const uint64_t errors[MAX_ERRNO]); /* the end of a JSON object */
void block_sigterm(sigset_t *ends); /* so that it is awaited and interrupts nothing */
void raise_file_limit(void);	    /* as many files as may be */
void serve_download(int fd) __attribute__((noreturn));

#endif
