// SPDX-License-Identifier: Apache-2.0
/*
 * A load of connections, and the server that answers it.
 *
 *	load connect|crr|rr|udp|packet|first [-n COUNT | -t SECONDS] [-w COUNT] [-s SEED] [-c]
 *	load churn                           [-n COUNT | -t SECONDS] [-r RATE] [-s SEED] [-c]
 *	load hold                            -n COUNT [-r RATE] [-s SEED] [-c]
 *	load download                        [-r RATE] [-s SEED]
 *	load serve -p PORT
 *
 * All but the server read targets from standard input, lines "ADDRESS PORT" of either family; each
 * connection goes to one of them at random. A line "-" begins another list: connections take turns
 * among the lists, so that what disturbs the machine disturbs all of them alike. One thread, one
 * connection at a time: the next begins when the last is over.
 *
 *	connect	time of connect() over TCP
 *	crr	time from connect() to the answer to one byte
 *	rr	time from one byte to its answer, on connections that stay open, some to each list
 *	udp	time from a datagram to its answer, from a socket without a peer; -c: from one with
 *	packet	time of send() of a datagram, of flows that stay open, some to each list. There
 *		is no answer: across veth pairs it is the time of its whole way through this machine
 *	first	the same of a flow's first datagram
 *	churn	as crr, but no error stops it: they are counted; -c: connect only; -r: so many begin
 *		each second, or as many as go. SIGTERM ends it
 *	hold	opens connections, with a byte there and back on each, says so, and asks each once
 *		more after SIGTERM; -c: asks all the time, -r times a second, one after another
 *	download
 *		one stream of numbers, read in pieces of 16 KiB, -r of them a second, until SIGTERM:
 *		then the server is asked to end it, and its count has to be what came
 *
 * The first six write one unsigned 64-bit number of nanoseconds for each sample, in the machine's
 * byte order, after -w samples that are not counted; the first error ends them with status 1. Churn
 * and download write one JSON object, hold two: once all are open, and at its end. Sockets close
 * with a reset, so that no port waits in TIME_WAIT.
 *
 * The server answers a byte 'w' with the address it was reached at, 'd' with a download, any other
 * with itself, and a datagram '-' not at all. Several may share a port, since one process may have
 * no more than so many files.
 */
#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "load.h"

volatile sig_atomic_t stopped;

static void stop(int number)
{
	(void)number;
	stopped = 1;
}

void die(const char *what)
{
	fprintf(stderr, "load: %s: %s\n", what, strerror(errno));
	exit(1);
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

static const char *const MODES[] = {"connect", "crr",	"rr",	"udp",	    "packet",
				    "first",   "churn", "hold", "download", "serve"};

static const char *parse_mode(const char *text)
{
	for (size_t i = 0; text && i < sizeof(MODES) / sizeof(*MODES); i++)
		if (!strcmp(text, MODES[i]))
			return MODES[i];
	fprintf(stderr, "usage: load connect|crr|rr|udp|packet|first|churn|hold|download|serve "
			"OPTIONS < targets\n");
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
	if (!strcmp(mode, "download"))
		return download(&options, &targets);
	if (!strcmp(mode, "rr") || !strcmp(mode, "packet"))
		return keep_alive(&options, &targets, !strcmp(mode, "packet"));
	return measure(mode, &options, &targets);
}
