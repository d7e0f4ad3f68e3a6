// SPDX-License-Identifier: Apache-2.0
/* Measures the time of connections and packets. The first error ends the run. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "load.h"

#define KEPT_ALIVE 16 /* connections or flows per list */

static void write_sample(uint64_t took)
{
	if (fwrite(&took, sizeof(took), 1, stdout) != 1)
		die("standard output");
}

static int once(const char *mode, const struct options *options, const union address *target,
		uint64_t *took)
{
	if (!strcmp(mode, "udp"))
		return options->connected ? udp_with_peer(target, took)
					  : udp_without_peer(target, took);
	if (!strcmp(mode, "put") || !strcmp(mode, "get"))
		return stream_once(target, options->bytes, *mode == 'g', took);
	if (!strcmp(mode, "first"))
		return send_first(target, took);
	return tcp_once(target, !strcmp(mode, "crr"), took);
}

static int timed_exchange(int fd, uint64_t *took)
{
	uint64_t start = now();
	int error = exchange(fd);

	*took = now() - start;
	return error;
}

/* Opens `count` sockets, for each list in turn. Returns NULL if one cannot be opened. */
static int *open_all_kept(const struct options *options, const struct targets *targets,
			  size_t count, bool datagrams)
{
	int *fds = calloc(count, sizeof(*fds));
	uint64_t state = options->seed;

	for (size_t i = 0; i < count; i++) {
		const union address *target = pick(targets, i, &state);
		int error = ENOMEM;

		if (fds)
			error =
			    datagrams ? open_kept_udp(target, &fds[i]) : open_kept(target, &fds[i]);
		if (error) {
			explain(target, error);
			return NULL;
		}
	}
	return fds;
}

static int report_lost(int error)
{
	fprintf(stderr, "load: a kept connection: %s\n", strerror(error));
	return 1;
}

int keep_alive(const char *mode, const struct options *options, const struct targets *targets)
{
	bool datagrams = strcmp(mode, "rr"), unanswered = !strcmp(mode, "packet");
	size_t count = targets->lists * KEPT_ALIVE;
	int *fds = open_all_kept(options, targets, count, datagrams);
	uint64_t start = now(), done = 0, took;
	int error = 0;

	if (!fds)
		return 1;
	for (uint64_t i = 0; !over(options, done, start); i++) {
		error = (unanswered ? send_unanswered : timed_exchange)(fds[i % count], &took);
		if (error)
			return report_lost(error);
		if (i < options->warm_up) {
			start = now();
			continue;
		}
		done++;
		write_sample(took);
	}
	/* These datagrams had no replies. An exchange on each flow verifies that it reaches the
	 * server. The first one may be lost while a relay's receive buffer is full.
	 */
	for (size_t i = 0; unanswered && i < count; i++) {
		error = exchange(fds[i]);
		if (error == ETIMEDOUT)
			error = exchange(fds[i]);
		if (error)
			return report_lost(error);
	}
	return fflush(stdout) ? 1 : 0;
}

int measure(const char *mode, const struct options *options, const struct targets *targets)
{
	uint64_t state = options->seed, start = now(), done = 0, took;

	for (uint64_t i = 0; !over(options, done, start); i++) {
		const union address *target = pick(targets, i, &state);
		int error;

		error = once(mode, options, target, &took);
		if (error) {
			explain(target, error);
			return 1;
		}
		if (i < options->warm_up) {
			start = now();
			continue;
		}
		done++;
		write_sample(took);
	}
	return fflush(stdout) ? 1 : 0;
}
