/* SPDX-License-Identifier: Apache-2.0 */
/* Declarations of the load generator. load.c describes the modes. */
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
#define UNANSWERED '-' /* the server drops datagrams that begin with it */
#define DOWNLOAD   'd' /* starts a download; the next byte ends it */
#define STREAM	   's' /* starts a stream: see stream.c */

union address {
	struct sockaddr any;
	struct sockaddr_in v4;
	struct sockaddr_in6 v6;
};

struct targets {
	union address *all;
	size_t count;
	size_t lists;
	size_t ends[MAX_LISTS]; /* the index in `all` after the last target of each list */
};

struct options {
	uint64_t count;
	uint64_t warm_up;
	uint64_t seed;
	uint64_t bytes;
	double seconds;
	double rate;
	bool connected;
	uint16_t port;
};

extern volatile sig_atomic_t stopped; /* by SIGTERM or SIGINT */

void die(const char *what) __attribute__((noreturn));

/* targets.c */
struct targets read_targets(FILE *stream);
/* Returns a random target of the list that is next in turn. */
const union address *pick(const struct targets *targets, uint64_t turn, uint64_t *state);
socklen_t length_of(const union address *address);
void explain(const union address *target, int error);

/* pace.c */
uint64_t now(void); /* nanoseconds */
bool over(const struct options *options, uint64_t done, uint64_t start);
/* Sleeps until number `turn` is due, with `rate` per second since `start`. Returns immediately if
 * it is overdue, or if `rate` is 0.
 */
void await_turn(double rate, uint64_t start, uint64_t turn);

/* connection.c: each returns 0 or an errno. *took is in nanoseconds and set only on success. */
int tcp_socket(const union address *target); /* unconnected; negative: errno is set */
int tcp_once(const union address *target, bool with_exchange, uint64_t *took);
int udp_with_peer(const union address *target, uint64_t *took);
int udp_without_peer(const union address *target, uint64_t *took);
/* Opens a connection, or a connected UDP socket, and exchanges a byte. */
int open_kept(const union address *target, int *fd);
int open_kept_udp(const union address *target, int *fd);
int exchange(int fd);
/* Sends a datagram that the server drops. *took is the time of send(). */
int send_unanswered(int fd, uint64_t *took);
int send_first(const union address *target, uint64_t *took);
int errno_of_failure(void);
/* stream.c: as above. Sends a stream of this size, or receives it. */
int stream_once(const union address *target, uint64_t size, bool get, uint64_t *took);

/* One function per group of modes. Each returns the exit code. */
int measure(const char *mode, const struct options *options, const struct targets *targets);
int keep_alive(const char *mode, const struct options *options, const struct targets *targets);
int churn(const struct options *options, const struct targets *targets);
int hold(const struct options *options, const struct targets *targets);
int download(const struct options *options, const struct targets *targets);
int serve(uint16_t port);

void write_errors(const uint64_t errors[MAX_ERRNO]); /* writes the end of a JSON object */
void block_sigterm(sigset_t *ends); /* for sigtimedwait(); it interrupts no system call */
void raise_file_limit(void);	    /* to the hard limit */
void keep_only(int fd);
void serve_download(int fd) __attribute__((noreturn));
void serve_stream(int fd) __attribute__((noreturn));

#endif
