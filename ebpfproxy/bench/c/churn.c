// SPDX-License-Identifier: Apache-2.0
/* Mode churn: connections one after another. Errors are counted and do not end the run. */
#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "load.h"

#define SLOW_NS                                                                                    \
	500000000 /* a packet was lost and sent again: the initial timeout of RFC 6298 is 1 s */

void write_errors(const uint64_t errors[MAX_ERRNO])
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

int churn(const struct options *options, const struct targets *targets)
{
	uint64_t state = options->seed, start = now(), done = 0, failed = 0, slowest = 0, slow = 0,
		 took;
	uint64_t errors[MAX_ERRNO] = {0};

	for (; !over(options, done, start); done++) {
		const union address *target = pick(targets, done, &state);
		int error;

		await_turn(options->rate, start, done);
		error = tcp_once(target, !options->connected, &took);

		if (error == EINTR && stopped)
			break; /* caused by the signal, not by the network */
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
