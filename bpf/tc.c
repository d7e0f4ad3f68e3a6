// SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
/*
 * The classifiers, for clsact with direct action: one for each kind of device and side, all the
 * same two functions, ingress() and egress().
 */
#include <uapi/linux/bpf.h>
#include <uapi/linux/if_ether.h>
#include <uapi/linux/if_packet.h>
#include <uapi/linux/in.h>
#include <uapi/linux/in6.h>

#include "compat.h"
#include "egress.h"
#include "ingress.h"

int from_any(struct __sk_buff *skb)
{
	return ingress(skb, ETHERNET_HEADER);
}

int from_any_l3(struct __sk_buff *skb)
{
	return ingress_without_ethernet(skb);
}

int to_any(struct __sk_buff *skb)
{
	return egress(skb, ETHERNET_HEADER);
}

int to_any_l3(struct __sk_buff *skb)
{
	return egress(skb, 0);
}

/* See continue_search(). */
int find_port(struct __sk_buff *skb)
{
	struct scratch *scratch = scratch_get();

	return scratch ? continue_search(skb, scratch) : DROP;
}
