// SPDX-License-Identifier: Apache-2.0
/* Mode hold: opens connections and keeps them open. */
#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <unistd.h>

#include "load.h"

void raise_file_limit(void)
{
	struct rlimit limit;

	if (!getrlimit(RLIMIT_NOFILE, &limit)) {
		limit.rlim_cur = limit.rlim_max;
		setrlimit(RLIMIT_NOFILE, &limit);
	}
}

void block_sigterm(sigset_t *ends)
{
	sigemptyset(ends);
	sigaddset(ends, SIGTERM);
	sigprocmask(SIG_BLOCK, ends, NULL);
}

struct held {
	int *fds; /* negative: the connection failed */
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

static void check_connection(struct held *held, uint64_t index)
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

static void write_report(struct held *held, uint64_t exchanges, uint64_t start)
{
	printf("{\"attempts\":%" PRIu64 ",\"failed\":%" PRIu64 ",\"seconds\":%.3f,", exchanges,
	       held->failed, (double)(now() - start) / 1e9);
	write_errors(held->errors);
}

int hold(const struct options *options, const struct targets *targets)
{
	struct held held = {.count = options->count};
	const struct timespec at_once = {0};
	uint64_t start = now(), exchanges = 0;
	sigset_t ends;

	block_sigterm(&ends);
	raise_file_limit();
	held.fds = calloc(held.count ? held.count : 1, sizeof(*held.fds));
	if (!held.fds)
		die("connections");
	open_all(&held, options, targets);
	write_report(&held, held.count, start);
	start = now();
	if (options->connected) {
		for (; sigtimedwait(&ends, NULL, &at_once) < 0 && held.count; exchanges++) {
			await_turn(options->rate, start, exchanges);
			check_connection(&held, exchanges % held.count);
		}
	} else {
		sigwaitinfo(&ends, NULL);
		start = now();
	}
	for (uint64_t i = 0; i < held.count; i++, exchanges++)
		check_connection(&held, i);
	write_report(&held, exchanges, start);
	return 0;
}
