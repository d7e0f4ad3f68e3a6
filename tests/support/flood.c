// SPDX-License-Identifier: Apache-2.0
/* Sends TCP segments or UDP datagrams:
 *
 *	flood KIND SOURCE SOURCES FIRST-PORT REPEATS ADDRESS PORT COUNT RATE
 *
 * KIND is tcp (SYNs), udp, or segments: a segment with data, resets and a FIN that seem to follow
 *it, a SYN, and again. Packet number i comes from address SOURCE + i % SOURCES and from port
 * FIRST-PORT + i / SOURCES / REPEATS. It goes to ADDRESS and PORT. RATE is in packets per second;
 *0: no limit. TCP sequence numbers are random. Prints the duration in seconds.
 *
 * The packets include the IP header, because the protocol of the raw sockets is IPPROTO_RAW. This
 * applies to IPv6 as well (inet6_create()). The kernel only sets the checksum of the IPv4 header.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/ip.h>
#include <netinet/ip6.h>
#include <netinet/tcp.h>
#include <netinet/udp.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

#define BATCH	64
#define LONGEST 80 /* bytes per packet; IPv6 and TCP headers have 60 */
#define FIN	1
#define SYN	2
#define RST	4
#define ACK	16

static const char payload[] = "?";
static const uint8_t flags_of_segments[] = {ACK, RST, RST | ACK, FIN | ACK, SYN};

struct flood {
	bool udp, segments;
	int family;
	uint32_t source[4]; /* IPv4: only the last word */
	uint32_t to[4];
	uint32_t sources, first_port, repeats;
	uint16_t port;
	uint32_t sequence;
	uint64_t count;
	double rate;
	uint64_t random;
};

struct packet {
	uint8_t bytes[LONGEST];
	size_t size;
};

static void die(const char *what)
{
	perror(what);
	exit(1);
}

static uint64_t now(void)
{
	struct timespec moment;

	clock_gettime(CLOCK_MONOTONIC, &moment);
	return (uint64_t)moment.tv_sec * 1000000000 + (uint64_t)moment.tv_nsec;
}

static void await_turn(const struct flood *flood, uint64_t start, uint64_t number)
{
	struct timespec moment;
	uint64_t due;

	if (flood->rate <= 0)
		return;
	due = start + (uint64_t)((double)number / flood->rate * 1e9);
	moment.tv_sec = (time_t)(due / 1000000000);
	moment.tv_nsec = (long)(due % 1000000000);
	clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &moment, NULL);
}

/* xorshift64* (Marsaglia 2003; Vigna 2016). */
static uint32_t random_word(struct flood *flood)
{
	uint64_t x = flood->random;

	x ^= x >> 12;
	x ^= x << 25;
	x ^= x >> 27;
	flood->random = x;
	return (uint32_t)((x * 0x2545f4914f6cdd1dULL) >> 32);
}

/* Adds the 16-bit words in network byte order to `sum`. An odd last byte is padded with 0. */
static uint64_t sum_of(const void *data, size_t size, uint64_t sum)
{
	const uint8_t *bytes = data;

	for (size_t i = 0; i < size; i += 2)
		sum += (uint64_t)bytes[i] << 8 | (i + 1 < size ? bytes[i + 1] : 0);
	return sum;
}

/* Covers the pseudo header (RFC 9293, 3.1; RFC 8200, 8.1), the transport header and the data. */
static uint16_t checksum(const struct flood *flood, const uint32_t source[4], const void *transport,
			 size_t size)
{
	uint64_t sum = (flood->udp ? IPPROTO_UDP : IPPROTO_TCP) + size;

	sum = sum_of(source, 16, sum);
	sum = sum_of(flood->to, 16, sum);
	sum = sum_of(transport, size, sum);
	while (sum >> 16)
		sum = (sum & 0xffff) + (sum >> 16);
	return htons((uint16_t)~sum);
}

static size_t write_ip(const struct flood *flood, const uint32_t source[4], uint8_t *bytes,
		       size_t transport)
{
	uint8_t protocol = flood->udp ? IPPROTO_UDP : IPPROTO_TCP;

	if (flood->family == AF_INET) {
		struct iphdr header = {.version = 4,
				       .ihl = 5,
				       .ttl = 64,
				       .protocol = protocol,
				       .tot_len = htons((uint16_t)(sizeof(header) + transport)),
				       .saddr = source[3],
				       .daddr = flood->to[3]};

		memcpy(bytes, &header, sizeof(header));
		return sizeof(header);
	}
	struct ip6_hdr header = {.ip6_flow = htonl(6U << 28),
				 .ip6_plen = htons((uint16_t)transport),
				 .ip6_nxt = protocol,
				 .ip6_hlim = 64};

	memcpy(&header.ip6_src, source, 16);
	memcpy(&header.ip6_dst, flood->to, 16);
	memcpy(bytes, &header, sizeof(header));
	return sizeof(header);
}

static void write_packet(struct flood *flood, uint64_t number, struct packet *packet)
{
	uint32_t source[4];
	uint64_t turn = number / flood->sources;
	uint16_t port = htons((uint16_t)(flood->first_port + turn / flood->repeats));
	uint8_t flags = flood->segments ? flags_of_segments[turn % sizeof(flags_of_segments)] : SYN;
	bool follows = flags & (RST | FIN);
	size_t data = flood->udp || flags == ACK ? sizeof(payload) - 1 : 0;
	size_t size = (flood->udp ? sizeof(struct udphdr) : sizeof(struct tcphdr)) + data;
	uint8_t *transport;

	if (!follows)
		flood->sequence = random_word(flood);
	memcpy(source, flood->source, sizeof(source));
	source[3] = htonl(ntohl(source[3]) + (uint32_t)(number % flood->sources));
	memset(packet, 0, sizeof(*packet));
	transport = packet->bytes + write_ip(flood, source, packet->bytes, size);
	if (flood->udp) {
		struct udphdr header = {
		    .source = port, .dest = flood->port, .len = htons((uint16_t)size)};

		memcpy(transport, &header, sizeof(header));
		memcpy(transport + sizeof(header), payload, data);
		header.check = checksum(flood, source, transport, size);
		memcpy(transport, &header, sizeof(header));
	} else {
		struct tcphdr header = {.source = port,
					.dest = flood->port,
					.seq = htonl(flood->sequence + follows),
					.ack_seq = flags & ACK ? random_word(flood) : 0,
					.doff = 5,
					.fin = !!(flags & FIN),
					.syn = !!(flags & SYN),
					.rst = !!(flags & RST),
					.ack = !!(flags & ACK),
					.window = htons(65535)};

		memcpy(transport, &header, sizeof(header));
		memcpy(transport + sizeof(header), payload, data);
		header.check = checksum(flood, source, transport, size);
		memcpy(transport, &header, sizeof(header));
	}
	packet->size = (size_t)(transport - packet->bytes) + size;
}

static void send_all(int sock, struct mmsghdr *messages, unsigned int count)
{
	unsigned int sent = 0;

	while (sent < count) {
		int done = sendmmsg(sock, messages + sent, count - sent, 0);

		if (done > 0)
			sent += (unsigned int)done;
		else if (errno != ENOBUFS && errno != EAGAIN && errno != EINTR)
			die("sendmmsg");
	}
}

static void run(struct flood *flood, int sock)
{
	static struct packet packets[BATCH];
	struct sockaddr_in to4 = {.sin_family = AF_INET};
	struct sockaddr_in6 to6 = {.sin6_family = AF_INET6};
	struct iovec parts[BATCH];
	struct mmsghdr messages[BATCH] = {};
	uint64_t start = now();

	to4.sin_addr.s_addr = flood->to[3];
	memcpy(&to6.sin6_addr, flood->to, 16);
	for (uint64_t number = 0; number < flood->count;) {
		unsigned int count = 0;

		for (; count < BATCH && number < flood->count; count++, number++) {
			struct msghdr *header = &messages[count].msg_hdr;

			write_packet(flood, number, &packets[count]);
			parts[count] = (struct iovec){packets[count].bytes, packets[count].size};
			header->msg_iov = &parts[count];
			header->msg_iovlen = 1;
			header->msg_name = flood->family == AF_INET ? (void *)&to4 : (void *)&to6;
			header->msg_namelen = flood->family == AF_INET ? sizeof(to4) : sizeof(to6);
		}
		send_all(sock, messages, count);
		await_turn(flood, start, number);
	}
	printf("%.3f\n", (double)(now() - start) / 1e9);
}

static void read_address(const struct flood *flood, const char *text, uint32_t to[4])
{
	memset(to, 0, 16);
	if (inet_pton(flood->family, text, flood->family == AF_INET ? to + 3 : to) != 1) {
		fprintf(stderr, "%s is no address of that family\n", text);
		exit(2);
	}
}

int main(int count, char **words)
{
	struct flood flood = {.random = now() | 1};
	int sock;

	if (count != 10) {
		fprintf(stderr, "flood tcp|segments|udp SOURCE SOURCES FIRST-PORT REPEATS ADDRESS "
				"PORT COUNT RATE\n");
		return 2;
	}
	flood.udp = !strcmp(words[1], "udp");
	flood.segments = !strcmp(words[1], "segments");
	flood.family = strchr(words[2], ':') ? AF_INET6 : AF_INET;
	read_address(&flood, words[2], flood.source);
	flood.sources = (uint32_t)strtoul(words[3], NULL, 10);
	flood.first_port = (uint32_t)strtoul(words[4], NULL, 10);
	flood.repeats = (uint32_t)strtoul(words[5], NULL, 10);
	read_address(&flood, words[6], flood.to);
	flood.port = htons((uint16_t)strtoul(words[7], NULL, 10));
	flood.count = strtoull(words[8], NULL, 10);
	flood.rate = strtod(words[9], NULL);
	sock = socket(flood.family, SOCK_RAW, IPPROTO_RAW);
	if (sock < 0)
		die("socket");
	run(&flood, sock);
	return 0;
}
