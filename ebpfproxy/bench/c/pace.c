// SPDX-License-Identifier: Apache-2.0
/* When the next connection starts, and when the run ends. */
#include <time.h>

#include "load.h"

uint64_t now(void)
{
	struct timespec moment;

	clock_gettime(CLOCK_MONOTONIC, &moment);
	return (uint64_t)moment.tv_sec * 1000000000 + (uint64_t)moment.tv_nsec;
}

bool over(const struct options *options, uint64_t done, uint64_t start)
{
	if (stopped)
		return true;
	if (options->count && done >= options->count)
		return true;
	return options->seconds > 0 && (double)(now() - start) >= options->seconds * 1e9;
}

void await_turn(double rate, uint64_t start, uint64_t turn)
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
