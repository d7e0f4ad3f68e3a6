// SPDX-License-Identifier: Apache-2.0
/*
 * The load generator and its server.
 *
 *	load connect|crr|rr|udp|udprr|packet|first|put|get
 *		[-n COUNT] [-t SECONDS] [-w COUNT] [-s SEED] [-b BYTES] [-c]
 *	load churn                           [-n COUNT | -t SECONDS] [-r RATE] [-s SEED] [-c]
 *	load hold                            -n COUNT [-r RATE] [-s SEED] [-c]
 *	load download                        [-r RATE] [-s SEED]
 *	load serve -p PORT
 *
 * All modes except serve read targets from standard input: lines "ADDRESS PORT" of both families.
 * Each connection selects a random target. A line "-" starts another list. Connections alternate
 * between the lists, so that disturbances of the machine affect all lists equally. There is one
 * thread and one connection at a time.
 *
 *	connect	time of connect() over TCP
 *	crr	time from connect() to the reply to one byte
 *	rr	time from one byte to its reply, on connections that stay open, several per list
 *	udp	time from a datagram to its reply, with an unconnected socket that stays open; -c:
 *		with a new connected socket, whose connect() is included
 *	udprr	as rr, with connected UDP sockets
 *	packet	time of send() of a datagram without a reply, in flows that stay open, several per
 *		list. Across veth pairs this includes the complete path through this machine
 *	first	as packet, for the first datagram of a flow
 *	put	time of a stream of -b bytes to the server, until it has received all
 *	get	the same from the server
 *	churn	as crr, but errors are counted and do not end the run; -c: connect only; -r:
 *		connections per second, without it as many as possible. SIGTERM ends the run
 *	hold	opens connections, exchanges a byte on each, writes a report, and exchanges a byte
 *on each after SIGTERM; -c: exchanges bytes all the time, -r per second, in turn download reads one
 *stream of numbers in pieces of 16 KiB, -r per second, until SIGTERM. Then the server ends the
 *stream and sends its count, which must equal the client's
 *
 * The first nine modes write one unsigned 64-bit number per sample: nanoseconds, in the machine's
 *byte order. The first -w samples are left out. The first error ends them with exit code 1. Churn
 *and download write one JSON object. Hold writes two: after all connections are open, and at the
 *end. Sockets close with a reset, so that no port remains in TIME_WAIT.
 *
 * The server replies to a byte 'w' with its own address of the connection, to 'd' with a download,
 * to 's' with a stream, and to any other byte with the same byte. It drops a datagram '-'. Several
 *servers can share a port, because the number of open files of a process is limited.
 */
#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
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

	while ((option = getopt(argc, argv, "n:t:w:s:p:r:b:c")) != -1) {
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
		else if (option == 'b')
			options.bytes = strtoull(optarg, NULL, 10);
		else if (option == 'c')
			options.connected = true;
		else
			exit(2);
	}
	if (!options.seed)
		options.seed = 1;
	return options;
}

static const char *const MODES[] = {"connect", "crr",	   "rr",   "udp", "udprr",
				    "packet",  "first",	   "put",  "get", "churn",
				    "hold",    "download", "serve"};

static const char *parse_mode(const char *text)
{
	for (size_t i = 0; text && i < sizeof(MODES) / sizeof(*MODES); i++)
		if (!strcmp(text, MODES[i]))
			return MODES[i];
	fprintf(
	    stderr,
	    "usage: load connect|crr|rr|udp|udprr|packet|first|put|get|churn|hold|download|serve "
	    "OPTIONS < targets\n");
	exit(2);
}

int main(int argc, char **argv)
{
	const char *mode = parse_mode(argc > 1 ? argv[1] : NULL);
	struct options options = parse_options(argc - 1, argv + 1);
	const struct sigaction action = {.sa_handler = stop};
	struct targets targets;

	/* By default a sleep may last 50 us longer: the interval of 20,000 connections per second.
	 */
	prctl(PR_SET_TIMERSLACK, 1);

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
	if (!strcmp(mode, "rr") || !strcmp(mode, "udprr") || !strcmp(mode, "packet"))
		return keep_alive(mode, &options, &targets);
	return measure(mode, &options, &targets);
}
