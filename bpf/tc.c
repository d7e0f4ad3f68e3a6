// SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
/*
 * The tc programs, attached by tcx, or by clsact with direct action. There is one for each side of
 * a device with and without an Ethernet header. Each counts its packets, so that the agent can
 * check that packets reach it.
 */
#include <uapi/linux/bpf.h>
#include <uapi/linux/if_ether.h>
#include <uapi/linux/if_packet.h>
#include <uapi/linux/in.h>
#include <uapi/linux/in6.h>

#include "compat.h"
#include "dsr_dial.h"
#include "dsr_receive.h"
#include "egress.h"
#include "ingress.h"

#define INGRESS_SLOT 0
#define EGRESS_SLOT  1

static __always_inline void device_count(struct __sk_buff *skb, u32 side)
{
	WORD_KEY(key, skb->ifindex % DEVICE_SLOTS * 2 + side);
	u64 *packets = device_packets.lookup(key);

	if (packets)
		*packets += 1;
}

int from_any(struct __sk_buff *skb)
{
	device_count(skb, INGRESS_SLOT);
	return ingress(skb, ETHERNET_HEADER);
}

int from_any_l3(struct __sk_buff *skb)
{
	device_count(skb, INGRESS_SLOT);
	return ingress_without_ethernet(skb);
}

/* The last step at egress. A device without an Ethernet header has no neighbors. */
static __always_inline int find_neighbor(struct __sk_buff *skb, u32 l3, int action)
{
	return action == PASS_ON && l3 == ETHERNET_HEADER && is_to_on_link_gateway(skb)
		   ? find_on_link(skb)
		   : action;
}

int to_any(struct __sk_buff *skb)
{
	device_count(skb, EGRESS_SLOT);
	return find_neighbor(skb, ETHERNET_HEADER, egress(skb, ETHERNET_HEADER));
}

int to_any_l3(struct __sk_buff *skb)
{
	device_count(skb, EGRESS_SLOT);
	return egress(skb, 0);
}

/*
 * Programs that are reached by tail calls, with the packet in the scratch. So the programs above
 * are short, and the verifier does not follow the parts in combination.
 */

int open_in(struct __sk_buff *skb)
{
	struct scratch *scratch = scratch_get();

	return scratch ? ingress_first(skb, scratch) : PASS_ON;
}

int open_out(struct __sk_buff *skb)
{
	struct scratch *scratch = scratch_get();

	if (!scratch)
		return PASS_ON;
	return find_neighbor(skb, scratch->packet.l3, egress_first(skb, scratch));
}

int icmp_in(struct __sk_buff *skb)
{
	struct scratch *scratch = scratch_get();

	return scratch ? ingress_icmp(skb, scratch) : PASS_ON;
}

int icmp_out(struct __sk_buff *skb)
{
	struct scratch *scratch = scratch_get();

	if (!scratch)
		return PASS_ON;
	return find_neighbor(skb, scratch->packet.l3, egress_icmp(skb, scratch));
}

/* See continue_search(). */
int find_port(struct __sk_buff *skb)
{
	struct scratch *scratch = scratch_get();
	int action;

	if (!scratch)
		return DROP;
	action = continue_search(skb, &scratch->view, &scratch->search, &scratch->work);
	packet_event(&scratch->view);
	return action;
}

/* See dial(). */
int dial_tunnel(struct __sk_buff *skb)
{
	struct scratch *scratch = scratch_get();
	int action;

	if (!scratch)
		return DROP;
	action = dial(skb, scratch);
	packet_event(&scratch->view);
	return action;
}

/* The ingress program of the Geneve device. */
int from_tunnel(struct __sk_buff *skb)
{
	struct scratch *scratch = scratch_get();
	int action;

	device_count(skb, INGRESS_SLOT);
	if (!scratch)
		return DROP;
	happening_reset(&scratch->view.happening);
	action = receive(skb, scratch);
	packet_event(&scratch->view);
	return action;
}
