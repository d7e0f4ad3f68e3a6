/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * Flows: the entries of a connection that is translated, how a packet finds them, and when they
 * end. docs/decisions/0023 has the reasons.
 */
#pragma once

#include "packet.h"
#include "service.h"

#define BUSY_ATTEMPTS  3
#define CLOSED_BY_BOTH (FLOW_CLIENT_FIN | FLOW_ENDPOINT_FIN)
#define EBUSY_NEGATIVE (-16)

/* Sequence numbers further than this beyond what was acknowledged are out of any usual window. */
#define WINDOW_MAX (1 << 22)

/* What does not fit on a stack of 512 bytes, and what the verifier need not follow: it knows
 * nothing of the content of a map's value, so paths that differ in that alone are one to it
 * (docs/decisions/0019). One program at a time uses it on a CPU: tc runs with bottom halves off.
 *
 *   packet, quoted   set by parsing; `quoted` is the packet that an ICMP error is about
 *   tuple            what the packet is looked up by: its own tuple, or the reverse of the quoted
 * one flow, reply      copies of the entries found, or the entries to be made flow_key         key
 * of `flow`, wherever `flow` or `reply` is set reply_key        key of `reply`, likewise now when
 * the packet was looked up, as flow.last_seen search           how far find_port() has come with
 * the flow in the scratch key, to          temporary; `to` is what the packet becomes others
 * arguments of helpers, used within one function
 */
struct port_search {
	u32 next;	 /* the port to look at, less FIRST_PORT */
	u32 left;	 /* how many ports are still to be looked at */
	u64 redirect_to; /* BPF_F_INGRESS or 0: by which side the packet comes again */
};

struct scratch {
	struct packet packet;
	struct packet quoted;
	struct flow_key tuple;
	struct flow flow;
	struct reply reply;
	struct flow_key flow_key;
	struct flow_key reply_key;
	struct flow_key key;
	struct flow_key to;
	struct service_key dialed;
	struct affinity_key affinity;
	struct source_range_key source;
	struct bpf_sock_tuple sockets;
	struct port_search search;
	u32 now;
	u8 bytes[128];
};
BPF_PERCPU_ARRAY(scratches, struct scratch, 1);

static __always_inline struct scratch *scratch_get(void)
{
	WORD_KEY(zero, 0);

	return scratches.lookup(zero);
}

/* `packet`, all zero but for where it begins, and the side. */
static __always_inline struct packet *packet_begin(struct packet *packet, u32 l3, u8 side)
{
	__builtin_memset(packet, 0, sizeof(*packet));
	packet->l3 = l3;
	packet->tuple.side = side;
	return packet;
}

static __always_inline struct node *node_get(void)
{
	WORD_KEY(zero, 0);

	return node.lookup(zero);
}

static __always_inline u32 flow_now(void)
{
	return (u32)(time_now() >> 30);
}

/* Whether `seconds` have passed since `last_seen`. Signed: another CPU may have read the clock
 * later.
 */
static __always_inline bool has_passed(u32 last_seen, u32 now, u32 seconds)
{
	s32 units = (s32)(now - last_seen);

	return units > 0 && (u64)(u32)units << 30 > seconds * NSEC_PER_SEC;
}

/* Which uses a port has had in flows, as bits of enum port_use. */
static __always_inline u8 *port_uses_of(u8 protocol, __be16 port)
{
	u32 number = bpf_ntohs(port);
	u32 line = protocol == IPPROTO_TCP   ? PORTS_TCP
		   : protocol == IPPROTO_UDP ? PORTS_UDP
					     : PORTS_SCTP;
	u32 entry = line * FLOW_PORT_LINE + number / 64;
	struct port_uses *uses = flow_ports.lookup(&entry);

	return uses ? &uses->use[number % 64] : NULL;
}

/* Most packets are of no flow: this spares them the lookups in hash maps. */
static __always_inline bool port_has_use(u8 protocol, __be16 port, u8 use)
{
	u8 *uses = port_uses_of(protocol, port);

	return uses && *uses & use;
}

static __always_inline void port_set_use(u8 protocol, __be16 port, u8 use)
{
	u8 *uses = port_uses_of(protocol, port);

	if (uses && !(*uses & use))
		*uses |= use; /* never taken back, so a lost race is repeated by the next flow */
}

static __always_inline void tuple_set(struct flow_key *key, const struct address *source,
				      __be16 source_port, const struct address *destination,
				      __be16 destination_port)
{
	key->source = *source;
	key->destination = *destination;
	key->source_port = source_port;
	key->destination_port = destination_port;
}

static __always_inline void tuple_reverse(struct flow_key *key, const struct flow_key *tuple)
{
	tuple_set(key, &tuple->destination, tuple->destination_port, &tuple->source,
		  tuple->source_port);
	key->protocol = tuple->protocol;
	key->side = tuple->side;
	key->pad = 0;
}

/* The key in `replies` of what an endpoint sends to a masqueraded client's port. */
static __always_inline void key_of_masqueraded(struct flow_key *key, const struct address *endpoint,
					       __be16 endpoint_port, __be16 reply_port, u8 protocol)
{
	__builtin_memset(key, 0, sizeof(*key));
	key->source = *endpoint;
	key->source_port = endpoint_port;
	key->destination_port = reply_port;
	key->protocol = protocol;
	key->side = MASQUERADED;
}

/* The key of a flow's entry in `replies`, from its entry in `flows`. */
static __always_inline void reply_key_of(struct flow_key *key, const struct flow_key *flow_key,
					 const struct flow *flow)
{
	key_of_masqueraded(key, &flow->endpoint, flow->endpoint_port, flow->reply_port,
			   flow_key->protocol);
	if (!(flow->flags & FLOW_MASQUERADE)) {
		key->destination = flow_key->source;
		key->side = AT_EGRESS;
	}
}

/* The key of a flow's entry in `flows`, from its entry in `replies`. */
static __always_inline void flow_key_of(struct flow_key *key, u8 protocol,
					const struct reply *reply)
{
	tuple_set(key, &reply->client, reply->client_port, &reply->frontend, reply->frontend_port);
	key->protocol = protocol;
	key->side = reply->flags & FLOW_NODE ? AT_EGRESS : AT_INGRESS;
	key->pad = 0;
}

/* An address in 32 bits: exact for IPv4; for IPv6 it distinguishes the few addresses of a node.
 * Never 0.
 */
static __always_inline u32 address_digest(const struct address *address)
{
	u32 digest = address->word[0];

	digest = (digest ^ (digest >> 15)) * 0x9e3779b1 + address->word[1];
	digest = (digest ^ (digest >> 15)) * 0x9e3779b1 + address->word[2];
	digest = (digest ^ (digest >> 15)) * 0x9e3779b1 + address->word[3];
	return digest ? digest : 1;
}

/* Whether a reply is to the address that its client is masqueraded with. */
static __always_inline bool is_masquerade(const struct reply *reply, const struct address *address)
{
	return reply->masquerade_digest == address_digest(address);
}

static __always_inline bool is_closed(u16 flags)
{
	return flags & FLOW_RESET || (flags & CLOSED_BY_BOTH) == CLOSED_BY_BOTH;
}

/* Whether an entry of a half-open map has been there for too long. LRU maps keep entries until they
 * need the room.
 */
static __always_inline bool half_open_is_over(u32 last_seen, u8 protocol, u32 now)
{
	const struct node *settings = node_get();

	if (!settings)
		return false;
	return has_passed(last_seen, now,
			  protocol == IPPROTO_TCP ? settings->tcp_syn : settings->udp);
}

/* Whether a reset that one side sends would end the connection for the other, as conntrack decides
 * (tcp_in_window(), be0502a3f2e9, 5.3; nf_conntrack_tcp_packet()) and RFC 5961, 3.2: its sequence
 * number is the very one that the other side waits for. `sent`: the end of the last segment of the
 * same side, which may not be acknowledged yet.
 */
static __always_inline bool reset_is_valid(u32 sequence, u32 sent, u32 acknowledged)
{
	return sequence == acknowledged ||
	       (sequence == sent && sequence - acknowledged < WINDOW_MAX);
}

/* A segment with FIN or RST: what it ends, as flags; 0 where its sequence number is not credible.
 */
static __always_inline u16 ends(const struct packet *packet, u32 sent, u32 acknowledged, u16 fin)
{
	if (packet->tcp_flags & TCP_RST)
		return reset_is_valid(packet->sequence, sent, acknowledged) ? FLOW_RESET : 0;
	return packet->sequence - acknowledged < WINDOW_MAX ? fin : 0;
}

/* Entries of the previous maps of flows, while there are such (map_migration.py), are moved to the
 * present ones when they are looked up.
 */
#define PREVIOUS(array, key)                                                                       \
	({                                                                                         \
		void *previous = (array);                                                          \
		previous ? bpf_map_lookup_elem(previous, key) : NULL;                              \
	})

static __always_inline void *previous_flows(void)
{
	WORD_KEY(zero, 0);

	return former_flows.lookup(zero);
}

static __always_inline void *previous_replies(void)
{
	WORD_KEY(zero, 0);

	return former_replies.lookup(zero);
}

static __always_inline void *previous_half_open_flows(void)
{
	WORD_KEY(zero, 0);

	return former_half_open_flows.lookup(zero);
}

static __always_inline void *previous_half_open_replies(void)
{
	WORD_KEY(zero, 0);

	return former_half_open_replies.lookup(zero);
}

static __always_inline struct flow *flow_lookup(struct flow_key *key, struct scratch *scratch)
{
	struct flow *found = flows.lookup(key);

	if (found)
		return found;
	found = PREVIOUS(previous_flows(), key);
	if (!found)
		return NULL;
	scratch->flow = *found;
	flows.insert(key, &scratch->flow);
	return flows.lookup(key);
}

static __always_inline struct flow *half_open_flow_lookup(struct flow_key *key,
							  struct scratch *scratch)
{
	struct flow *found = half_open_flows.lookup(key);

	if (found)
		return found;
	found = PREVIOUS(previous_half_open_flows(), key);
	if (!found)
		return NULL;
	scratch->flow = *found;
	half_open_flows.insert(key, &scratch->flow);
	return half_open_flows.lookup(key);
}

static __always_inline struct reply *reply_lookup(struct flow_key *key, struct scratch *scratch)
{
	struct reply *found = replies.lookup(key);

	if (found)
		return found;
	found = PREVIOUS(previous_replies(), key);
	if (!found)
		return NULL;
	scratch->reply = *found;
	replies.insert(key, &scratch->reply);
	return replies.lookup(key);
}

static __always_inline struct reply *half_open_reply_lookup(struct flow_key *key,
							    struct scratch *scratch)
{
	struct reply *found = half_open_replies.lookup(key);

	if (found)
		return found;
	found = PREVIOUS(previous_half_open_replies(), key);
	if (!found)
		return NULL;
	scratch->reply = *found;
	half_open_replies.insert(key, &scratch->reply);
	return half_open_replies.lookup(key);
}

/* Remove what flow_lookup() has found, for good. */
static __always_inline void flow_delete(struct flow_key *key)
{
	void *previous = previous_flows();

	flows.delete(key);
	if (previous)
		bpf_map_delete_elem(previous, key);
}

static __always_inline void half_open_flow_delete(struct flow_key *key)
{
	void *previous = previous_half_open_flows();

	half_open_flows.delete(key);
	if (previous)
		bpf_map_delete_elem(previous, key);
}

/* What a segment says of the connection's sequence numbers. Those of RST and SYN are not kept, but
 * of the SYNs that open it.
 */
#define note_sequence(entry, packet, half_open)                                                    \
	({                                                                                         \
		u8 noted = (packet)->tcp_flags;                                                    \
                                                                                                   \
		if (!(noted & TCP_RST) && (!(noted & TCP_SYN) || half_open)) {                     \
			(entry)->sequence_end = (packet)->sequence_end;                            \
			if (noted & TCP_ACK)                                                       \
				(entry)->acknowledged = (packet)->acknowledged;                    \
		}                                                                                  \
	})

static __always_inline bool is_segment(const struct packet *packet)
{
	return packet->tuple.protocol == IPPROTO_TCP && packet->fragment != LATER;
}

/* The client of an established flow has sent `packet`. Nothing but the entry that was found is
 * written, unless the connection ends.
 */
static __always_inline void client_sent(struct flow *flow, const struct packet *packet,
					struct scratch *scratch)
{
	if (flow->last_seen != scratch->now)
		flow->last_seen = scratch->now;
	if (!is_segment(packet))
		return;
	if (packet->tcp_flags & (TCP_FIN | TCP_RST)) {
		struct reply *reply = replies.lookup(&scratch->reply_key);

		if (reply) {
			u16 ended =
			    ends(packet, flow->sequence_end, reply->acknowledged, FLOW_CLIENT_FIN);

			flow->flags |= ended;
			reply->flags |= ended;
		}
	}
	note_sequence(flow, packet, false);
}

/* The endpoint of an established flow has sent `packet`. */
static __always_inline void endpoint_sent(struct reply *reply, const struct packet *packet,
					  struct scratch *scratch)
{
	if (reply->last_seen != scratch->now)
		reply->last_seen = scratch->now;
	if (!is_segment(packet))
		return;
	if (packet->tcp_flags & (TCP_FIN | TCP_RST)) {
		struct flow *flow = flows.lookup(&scratch->flow_key);

		if (flow) {
			u16 ended = ends(packet, reply->sequence_end, flow->acknowledged,
					 FLOW_ENDPOINT_FIN);

			reply->flags |= ended;
			flow->flags |= ended;
		}
	}
	note_sequence(reply, packet, false);
}

/* The endpoint of a half-open flow has sent `packet`. Half-open entries are over at the same time,
 * so both are refreshed once a second. A reset refuses the connection: whoever can send it from the
 * endpoint's address can do worse.
 */
static __always_inline void endpoint_answered(struct reply *reply, const struct packet *packet,
					      struct scratch *scratch)
{
	bool resets = is_segment(packet) && packet->tcp_flags & TCP_RST;

	reply->flags |= FLOW_REPLIED;
	if (resets || reply->last_seen != scratch->now) {
		struct flow *flow = half_open_flows.lookup(&scratch->flow_key);
		u16 ended = resets ? FLOW_RESET : 0;

		reply->last_seen = scratch->now;
		reply->flags |= ended;
		if (flow) {
			flow->last_seen = scratch->now;
			flow->flags |= ended;
		}
	}
	if (is_segment(packet))
		note_sequence(reply, packet, true);
}

/* By what a packet that fits the key of a reply has to fit its value, too. */
enum reply_match {
	MATCH_KEY,	   /* nothing else: the key has both addresses */
	MATCH_MASQUERADE,  /* it is sent to what the client is masqueraded with */
	MATCH_DESTINATION, /* it is sent to the client: ingress has seen it, if it is masqueraded */
	MATCH_SOURCE,	   /* the client sends it: the key is of its reverse */
};

static __always_inline bool reply_matches(const struct reply *reply, const struct flow_key *tuple,
					  enum reply_match match)
{
	switch (match) {
	case MATCH_MASQUERADE:
		return is_masquerade(reply, &tuple->destination);
	case MATCH_DESTINATION:
		return address_equal(&reply->client, &tuple->destination);
	case MATCH_SOURCE:
		return address_equal(&reply->client, &tuple->source);
	default:
		return true;
	}
}

/* Find the entry of `scratch->reply_key` that fits `scratch->tuple`; it is copied to
 * `scratch->reply`, and `scratch->flow_key` is set. `seen`: the endpoint's packet, which is new to
 * the entry; NULL where it is not. False: there is none; `scratch->reply` may be another flow's.
 */
static __always_inline bool reply_find(struct scratch *scratch, enum reply_match match,
				       const struct packet *seen)
{
	struct reply *reply = reply_lookup(&scratch->reply_key, scratch);
	bool half_open = !reply;

	if (half_open) {
		reply = half_open_reply_lookup(&scratch->reply_key, scratch);
		if (!reply) {
			scratch->reply.client_port = 0;
			return false;
		}
	}
	scratch->reply = *reply;
	if (!reply_matches(&scratch->reply, &scratch->tuple, match))
		return false;
	scratch->now = flow_now(); /* it costs as much as parsing: not for packets of no flow */
	if (half_open &&
	    half_open_is_over(scratch->reply.last_seen, scratch->reply_key.protocol, scratch->now))
		return false;
	flow_key_of(&scratch->flow_key, scratch->reply_key.protocol, &scratch->reply);
	if (seen && (match != MATCH_DESTINATION || !scratch->reply.masquerade_digest)) {
		/* The endpoint answers another connection, of no flow, that has this one's tuple.
		 */
		if (seen->tcp_flags & TCP_SYN && is_closed(scratch->reply.flags)) {
			replies.delete(&scratch->reply_key);
			return false;
		}
		if (half_open)
			endpoint_answered(reply, seen, scratch);
		else
			endpoint_sent(reply, seen, scratch);
	}
	return true;
}

/* What a packet of `tuple`'s source is, as a reply to a client whose address the endpoint sees. */
static __always_inline void reply_key_unmasqueraded(struct flow_key *key,
						    const struct flow_key *tuple)
{
	*key = *tuple;
	key->side = AT_EGRESS;
}

/* EBUSY: the bucket is locked by a reader (htab_lock_bucket()); cilium #35010. */
#define RETRY(write)                                                                               \
	({                                                                                         \
		int failed = 0;                                                                    \
		_Pragma("nounroll") for (int attempt = 0; attempt < BUSY_ATTEMPTS;                 \
					 again(attempt, 1))                                        \
		{                                                                                  \
			failed = (write);                                                          \
			if (failed != EBUSY_NEGATIVE)                                              \
				break;                                                             \
			count(COUNTER_FLOWS_BUSY);                                                 \
		}                                                                                  \
		failed;                                                                            \
	})

static __always_inline int put_flow(struct flow_key *key, struct flow *flow)
{
	return flows.update(key, flow);
}

static __always_inline int put_reply(struct flow_key *key, struct reply *reply)
{
	return replies.update(key, reply);
}

static __always_inline int put_half_open_flow(struct flow_key *key, struct flow *flow)
{
	return half_open_flows.update(key, flow);
}

static __always_inline int add_half_open_reply(struct flow_key *key, struct reply *reply)
{
	return half_open_replies.insert(key, reply);
}

/* Both sides have been heard: the flow in the scratch moves to the established ones, the reply
 * first, so that nothing finds one entry and not the other. Where there is no room it stays where
 * it is.
 */
static __always_inline void establish(struct scratch *scratch)
{
	if (RETRY(put_reply(&scratch->reply_key, &scratch->reply)) ||
	    RETRY(put_flow(&scratch->flow_key, &scratch->flow))) {
		count(COUNTER_FLOWS_FULL);
		replies.delete(&scratch->reply_key);
		return;
	}
	half_open_flow_delete(&scratch->flow_key);
	half_open_replies.delete(&scratch->reply_key);
}

/* Whether this packet of the client shows that it has heard the endpoint. */
static __always_inline bool completes(const struct packet *packet, const struct reply *reply)
{
	if (!(reply->flags & FLOW_REPLIED))
		return false;
	if (packet->tuple.protocol != IPPROTO_TCP)
		return true;
	return is_segment(packet) &&
	       (packet->tcp_flags & (TCP_SYN | TCP_ACK | TCP_RST)) == TCP_ACK &&
	       packet->acknowledged == reply->sequence_end;
}

static __always_inline void carried(u32 service_id, u32 bytes, bool to_endpoint, bool is_new)
{
	struct traffic *sum = traffic.lookup(&service_id);

	if (!sum)
		return;
	if (to_endpoint) {
		sum->new_flows += is_new;
		sum->packets_in += 1;
		sum->bytes_in += bytes;
	} else {
		sum->packets_out += 1;
		sum->bytes_out += bytes;
	}
}
