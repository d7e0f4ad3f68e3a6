/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * Connections of this node outside the flows: which sockets, and which connections that netfilter
 * masqueraded, use an address and port.
 */
#pragma once

#include "flow_key.h"

/* Sets `tuple` for the lookup of the socket that receives packets from `from` to `to`. Returns the
 * size of the part of `tuple` that is set.
 */
static __always_inline u32 socket_tuple(struct bpf_sock_tuple *tuple, const struct address *from,
					__be16 from_port, const struct address *to, __be16 to_port)
{
	if (address_is_v4(from)) {
		tuple->ipv4.saddr = from->word[3];
		tuple->ipv4.daddr = to->word[3];
		tuple->ipv4.sport = from_port;
		tuple->ipv4.dport = to_port;
		return sizeof(tuple->ipv4);
	}
	*(struct address *)tuple->ipv6.saddr = *from;
	*(struct address *)tuple->ipv6.daddr = *to;
	tuple->ipv6.sport = from_port;
	tuple->ipv6.dport = to_port;
	return sizeof(tuple->ipv6);
}

/* Whether a UDP socket of this node receives packets with this tuple. `connected`: only a socket
 * that is connected to the sender counts.
 */
static __always_inline bool udp_socket_receives(struct __sk_buff *skb, struct bpf_sock_tuple *tuple,
						u32 size, bool connected)
{
	struct bpf_sock *found = bpf_sk_lookup_udp(skb, tuple, size, BPF_F_CURRENT_NETNS, 0);
	bool receives;

	if (!found)
		return false;
	receives = !connected || found->state == BPF_TCP_ESTABLISHED;
	bpf_sk_release(found);
	return receives;
}

/* As udp_socket_receives() for TCP. A listening socket does not count: it has no connection with
 * the sender.
 */
static __always_inline bool tcp_socket_receives(struct __sk_buff *skb, struct bpf_sock_tuple *tuple,
						u32 size)
{
	struct bpf_sock *found = bpf_skc_lookup_tcp(skb, tuple, size, BPF_F_CURRENT_NETNS, 0);
	bool receives;

	if (!found)
		return false;
	receives = found->state != BPF_TCP_LISTEN;
	barrier(); /* the verifier rejects one load instruction for both kinds of sockets */
	bpf_sk_release(found);
	return receives;
}

/* Whether a connected UDP socket of this node receives the packet. Such a socket takes precedence
 * over a NodePort with its port: the kernel can assign a NodePort that is within
 * ip_local_port_range.
 */
static __always_inline bool is_for_connected_socket(struct __sk_buff *skb,
						    const struct packet *packet,
						    struct bpf_sock_tuple *tuple)
{
	const struct flow_key *key = &packet->tuple;
	u32 size;

	if (!HAVE(SK_LOOKUP_UDP) || key->protocol != IPPROTO_UDP)
		return false;
	size = socket_tuple(tuple, &key->source, key->source_port, &key->destination,
			    key->destination_port);
	return udp_socket_receives(skb, tuple, size, true);
}

/* Whether a socket of this node or netfilter already uses the port at the masquerade address of the
 * flow for a connection to its endpoint. Connections that netfilter masqueraded before mode ebpf
 * started are in `netfilter_flows`.
 */
static __always_inline bool port_is_in_use(struct __sk_buff *skb, const struct flow *flow,
					   __be16 port, u8 protocol, struct workspace *work)
{
	const struct node *settings = node_get();

	if (settings && settings->flags & NODE_NETFILTER_FLOWS) {
		tuple_set(&work->key, &flow->endpoint, flow->endpoint_port, &flow->masquerade,
			  port);
		work->key.protocol = protocol;
		work->key.side = AT_INGRESS;
		work->key.pad = 0;
		if (netfilter_flows.lookup(&work->key))
			return true;
	}
	if (HAVE(SKC_LOOKUP_TCP) && HAVE(SK_LOOKUP_UDP)) {
		struct bpf_sock_tuple *tuple = &work->sockets;
		u32 size = socket_tuple(tuple, &flow->endpoint, flow->endpoint_port,
					&flow->masquerade, port);

		if (protocol == IPPROTO_TCP)
			return tcp_socket_receives(skb, tuple, size);
		if (protocol == IPPROTO_UDP)
			return udp_socket_receives(skb, tuple, size, false);
	}
	return false;
}
