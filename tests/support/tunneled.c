/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * from_tunnel() of bpf/tc.c for test runs. Their packets have no sender, network and Geneve option,
 * so this program takes all of them from the end of the packet. It is compiled after tc.c, as one
 * text.
 */

/* struct bpf_tunnel_key as Linux 6.0 has it. A receiver finds the local address of a key that was
 * set as the address of the sender.
 */
struct sender_key {
	struct tunnel_key key;
	union {
		u32 v4;
		struct address v6;
	} local;
};

struct tunnel_trailer {
	struct tunnel_option option;
	struct address sender;
	u32 network;
};

int receive_tunneled(struct __sk_buff *skb)
{
	u32 end = skb->len - sizeof(struct tunnel_trailer);
	struct scratch *scratch = scratch_get();
	struct tunnel_trailer trailer;
	struct sender_key key = {};
	u64 flags = 0;
	int action;

	if (!scratch || bpf_skb_load_bytes(skb, end, &trailer, sizeof(trailer)))
		return DROP;
	key.key.network = trailer.network;
	if (address_is_v4(&trailer.sender)) {
		key.local.v4 = bpf_ntohl(trailer.sender.word[3]);
	} else {
		key.local.v6 = trailer.sender;
		flags = TUNNEL_IPV6;
	}
	if (bpf_skb_set_tunnel_key(skb, (void *)&key, sizeof(key), flags) ||
	    bpf_skb_set_tunnel_opt(skb, (void *)&trailer.option, sizeof(trailer.option)) ||
	    bpf_skb_change_tail(skb, end, 0))
		return DROP;
	happening_reset(scratch);
	action = receive(skb, scratch);
	packet_event(scratch);
	return action;
}
