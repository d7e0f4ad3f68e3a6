// SPDX-License-Identifier: Apache-2.0
/* Reads the targets and selects the next one. */
#include <arpa/inet.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "load.h"

/* xorshift64*; the state is never 0. */
static uint64_t random_number(uint64_t *state)
{
	*state ^= *state >> 12;
	*state ^= *state << 25;
	*state ^= *state >> 27;
	return *state * 0x2545f4914f6cdd1d;
}

socklen_t length_of(const union address *address)
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

struct targets read_targets(FILE *stream)
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

const union address *pick(const struct targets *targets, uint64_t turn, uint64_t *state)
{
	size_t list = turn % targets->lists;
	size_t start = list ? targets->ends[list - 1] : 0;

	return &targets->all[start + random_number(state) % (targets->ends[list] - start)];
}

void explain(const union address *target, int error)
{
	char text[INET6_ADDRSTRLEN];
	const void *raw = target->any.sa_family == AF_INET ? (const void *)&target->v4.sin_addr
							   : (const void *)&target->v6.sin6_addr;

	inet_ntop(target->any.sa_family, raw, text, sizeof(text));
	fprintf(stderr, "load: %s port %u: %s\n", text, ntohs(target->v4.sin_port),
		strerror(error));
}
