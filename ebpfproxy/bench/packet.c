// SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
/*
 * Programs that the benchmark packet runs again and again on one packet, compiled as one text with
 * bpf/tc.c. Such a run sees what the last one left, so each sets up first what it needs to find.
 */

/* Removes the mark of the last run. Without hide(), clang may compute the address of the mark once
 * for this write and later reads, which the verifier does not allow for fields of the packet.
 */
#define unmark(skb)                                                                                \
	({                                                                                         \
		mark_set(skb, MARK_NONE);                                                          \
		hide(skb);                                                                         \
	})

int floor_of_all(struct __sk_buff *skb)
{
	return PASS_ON;
}

int ingress_unmarked(struct __sk_buff *skb)
{
	unmark(skb);
	return ingress(skb, ETHERNET_HEADER);
}

int egress_unmarked(struct __sk_buff *skb)
{
	unmark(skb);
	return egress(skb, ETHERNET_HEADER);
}

/* Programs that first put an address back, without its checksums, and floors that do that alone. */
#define CLIENT_V4 {bpf_htonl(0xc0000205)}		      /* 192.0.2.5 */
#define CLIENT_V6 {bpf_htonl(0x20010db8), 0, 0, bpf_htonl(5)} /* 2001:db8::5 */
#define NODE_V4	  {bpf_htonl(0xac120002)}		      /* 172.18.0.2 */
#define NODE_V6                                                                                    \
	{bpf_htonl(0xfd000172), bpf_htonl(0x00180000), 0, bpf_htonl(2)} /* fd00:172:18::2          \
									 */

#define PUT_BACK(name, words, offset, then)                                                        \
	static __always_inline void put_back_##name(struct __sk_buff *skb)                         \
	{                                                                                          \
		__be32 address[] = words;                                                          \
                                                                                                   \
		bpf_skb_store_bytes(skb, ETHERNET_HEADER + offset, address, sizeof(address), 0);   \
		unmark(skb);                                                                       \
	}                                                                                          \
                                                                                                   \
	int floor_of_##name(struct __sk_buff *skb)                                                 \
	{                                                                                          \
		put_back_##name(skb);                                                              \
		return PASS_ON;                                                                    \
	}                                                                                          \
                                                                                                   \
	int name(struct __sk_buff *skb)                                                            \
	{                                                                                          \
		put_back_##name(skb);                                                              \
		return then(skb, ETHERNET_HEADER);                                                 \
	}

PUT_BACK(ingress_node_v4, NODE_V4, 16, ingress)
PUT_BACK(ingress_node_v6, NODE_V6, 24, ingress)
PUT_BACK(egress_client_v4, CLIENT_V4, 12, egress)
PUT_BACK(egress_client_v6, CLIENT_V6, 8, egress)

/* A client's first packet to FRONTEND, be it translated already; no two runs are the same client.
 */
#define FRONTEND_ADDRESS 0x0a600001 /* 10.96.0.1 */
#define FRONTEND_PORT	 80
#define ADDRESSES_AT	 (ETHERNET_HEADER + 12)
#define PORTS_AT	 (ETHERNET_HEADER + 20)

static __always_inline void begin_another(struct __sk_buff *skb)
{
	__be32 addresses[2] = {bpf_get_prandom_u32(), bpf_htonl(FRONTEND_ADDRESS)};
	__be16 ports[2] = {random_port(), bpf_htons(FRONTEND_PORT)};

	bpf_skb_store_bytes(skb, ADDRESSES_AT, addresses, sizeof(addresses), 0);
	bpf_skb_store_bytes(skb, PORTS_AT, ports, sizeof(ports), 0);
}

/* What new_flow costs beside the new flow. */
int floor_of_new_flow(struct __sk_buff *skb)
{
	begin_another(skb);
	unmark(skb);
	return PASS_ON;
}

int new_flow(struct __sk_buff *skb)
{
	begin_another(skb);
	unmark(skb);
	return ingress(skb, ETHERNET_HEADER);
}
