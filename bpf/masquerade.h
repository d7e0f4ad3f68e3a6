/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * The address that a new flow is masqueraded with. Usually it is the only one of the output device,
 * which `devices` contains. With DEVICE_SOURCES it is the one that the kernel would select as the
 * source (docs/decisions/0011).
 */
#pragma once

#include "flow.h"
#include "route.h"

/* `length` of a complete struct source_key: the two fields before the address, and the address. */
#define SOURCE_KEY_BITS 192

/* Returns the masquerade address of the device in the family of `like`. It is unspecified if the
 * device has none.
 */
static __always_inline const struct address *address_of_device(const struct device *device,
							       const struct address *like)
{
	return address_is_v4(like) ? &device->v4 : &device->v6;
}

/* Looks up the route of a packet to `endpoint` that leaves by the device `ifindex`. Returns false
 * if no route leads there.
 */
static __always_inline bool look_up_source(struct __sk_buff *skb, const struct packet *packet,
					   u32 ifindex, const struct address *endpoint,
					   struct address *from, struct bpf_fib_lookup *lookup)
{
	u32 flags = BPF_FIB_LOOKUP_OUTPUT;
	int found;

	if (HAVE(FIB_LOOKUP_SRC))
		flags |= FIB_LOOKUP_SKIP_NEIGHBOR | FIB_LOOKUP_SOURCE;
	route_source(from, &packet->tuple.source);
	found =
	    look_up_route(skb, lookup, ifindex, 0, packet->tuple.protocol, from, endpoint, flags);
	/* The packet may be larger than the MTU, since it may be segmented later. */
	return (found == BPF_FIB_LKUP_RET_SUCCESS || found == BPF_FIB_LKUP_RET_NO_NEIGH ||
		found == BPF_FIB_LKUP_RET_FRAG_NEEDED) &&
	       lookup->ifindex == ifindex;
}

/* Sets the masquerade address of the flow to the source address of the route that was found. */
static __always_inline void take_source_of_route(const struct bpf_fib_lookup *lookup,
						 struct flow *flow)
{
	struct address source;

	if (address_is_v4(&flow->endpoint))
		address_v4(&source, lookup->ipv4_src);
	else
		source = *(const struct address *)lookup->ipv6_src;
	if (!address_is_unspecified(&source))
		flow->masquerade = source;
}

/* As take_source_of_route() for kernels whose route lookup returns only the next hop. */
static __always_inline void take_source_from_table(u32 ifindex, bool routed,
						   const struct bpf_fib_lookup *lookup,
						   struct source_key *key, struct flow *flow)
{
	struct address *source;

	key->length = SOURCE_KEY_BITS;
	key->ifindex = ifindex;
	key->side = SOURCE_OF_NEXT_HOP;
	key->address = flow->endpoint;
	if (routed && lookup->family == AF_INET)
		address_v4(&key->address, lookup->ipv4_dst);
	else if (routed)
		key->address = *(const struct address *)lookup->ipv6_dst;
	source = source_addresses.lookup(key);
	if (!source) {
		key->side = SOURCE_OF_DESTINATION;
		key->address = flow->endpoint;
		source = source_addresses.lookup(key);
	}
	/* A gateway may have an address of the other family. */
	if (source && address_is_v4(source) == address_is_v4(&flow->endpoint))
		flow->masquerade = *source;
}

/* Sets the masquerade address of `view->flow` to the one for the output device `ifindex`. Returns
 * false if there is no address; this is counted.
 */
static __always_inline bool choose_masquerade(struct __sk_buff *skb, const struct packet *packet,
					      u32 ifindex, struct flow_view *view,
					      struct workspace *work)
{
	struct device *device = device_get(ifindex);
	struct flow *flow = &view->flow;
	bool routed = false;

	if (device)
		flow->masquerade = *address_of_device(device, &flow->endpoint);
	if (device && device->flags & DEVICE_SOURCES) {
		if (HAVE(FIB_LOOKUP))
			routed = look_up_source(skb, packet, ifindex, &flow->endpoint,
						&work->key.source, &work->lookup);
		if (!HAVE(FIB_LOOKUP_SRC))
			take_source_from_table(ifindex, routed, &work->lookup,
					       &work->source_address, flow);
		else if (routed)
			take_source_of_route(&work->lookup, flow);
	}
	if (!device || address_is_unspecified(&flow->masquerade)) {
		happened(&view->happening, EVENT_DROPPED, COUNTER_NO_ADDRESS);
		return false;
	}
	return true;
}
