/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * How a packet finds its flow: the keys of entries in `flows` and `replies`, and a filter by port.
 */
#pragma once

#include "scratch.h"

/* Returns the byte that says whether a flow has used the port in this way. */
static __always_inline u8 *port_use_of(u8 protocol, __be16 port, enum port_use use)
{
	u32 number = bpf_ntohs(port);
	WORD_KEY(entry, port_line(protocol) * FLOW_PORT_LINE + number / 64);
	struct port_uses *uses = flow_ports.lookup(entry);

	return uses ? &uses->is_used[use + number % 64] : NULL;
}

/* Whether a flow has used the port in this way. Most packets belong to no flow; this check saves
 * their lookups in hash maps.
 */
static __always_inline bool port_has_use(u8 protocol, __be16 port, enum port_use use)
{
	u8 *used = port_use_of(protocol, port, use);

	return used && *used;
}

static __always_inline void port_set_use(u8 protocol, __be16 port, enum port_use use)
{
	u8 *used = port_use_of(protocol, port, use);

	if (used && !*used)
		*used = 1;
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

/* Sets the addresses and ports of a reply as the client sees it. */
static __always_inline void tuple_of_reply(struct flow_key *to, const struct reply *reply)
{
	tuple_set(to, &reply->frontend, reply->frontend_port, &reply->client, reply->client_port);
}

/* Sets the addresses and ports of a packet of the flow that the endpoint gets from `source`. */
static __always_inline void tuple_to_endpoint(struct flow_key *to, const struct address *source,
					      const struct flow *flow)
{
	tuple_set(to, source, flow->reply_port, &flow->endpoint, flow->endpoint_port);
}

static __always_inline void tuple_reverse(struct flow_key *key, const struct flow_key *tuple)
{
	tuple_set(key, &tuple->destination, tuple->destination_port, &tuple->source,
		  tuple->source_port);
	key->protocol = tuple->protocol;
	key->side = tuple->side;
	key->pad = 0;
}

/* Sets `key` to the key in `replies` of packets that an endpoint sends to a masqueraded client. */
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

/* Sets `key` to the key of a flow's entry in `replies`, derived from its entry in `flows`. */
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

/* Sets `key` to the key of a flow's entry in `flows`, derived from its entry in `replies`. */
static __always_inline void flow_key_of(struct flow_key *key, u8 protocol,
					const struct reply *reply)
{
	tuple_set(key, &reply->client, reply->client_port, &reply->frontend, reply->frontend_port);
	key->protocol = protocol;
	key->side = reply->flags & FLOW_NODE ? AT_EGRESS : AT_INGRESS;
	key->pad = 0;
}

/* Hashes an address to 32 bits. For IPv4 the digest is exact. For IPv6 it is sufficient to
 * distinguish the few addresses of a node. Never returns 0.
 */
static __always_inline u32 address_digest(const struct address *address)
{
	u32 digest = address->word[0];

	digest = (digest ^ (digest >> 15)) * 0x9e3779b1 + address->word[1];
	digest = (digest ^ (digest >> 15)) * 0x9e3779b1 + address->word[2];
	digest = (digest ^ (digest >> 15)) * 0x9e3779b1 + address->word[3];
	return digest ? digest : 1;
}

/* Whether `address` is the masquerade address of the reply's flow. */
static __always_inline bool is_masquerade(const struct reply *reply, const struct address *address)
{
	return reply->masquerade_digest == address_digest(address);
}
