// SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
/*
 * The cgroup socket hooks: connect, sendmsg, recvmsg, getpeername, post_bind, sock_release. Each
 * reads its context and calls a function of socket.h.
 */
#include <uapi/linux/bpf.h>
#include <uapi/linux/in.h>

#include "compat.h"
#include "socket.h"

#define CONTINUE 1
#define FAIL	 0

static __always_inline int fail(int error)
{
	if (HAVE(SET_RETVAL))
		bpf_set_retval(-error);
	return FAIL; /* EPERM if the kernel has no bpf_set_retval() (before 5.18, b44123b4a3dc) */
}

static __always_inline bool peer_read(struct bpf_sock_addr *ctx, bool v4, struct service_key *peer)
{
	if (ctx->protocol != IPPROTO_TCP && ctx->protocol != IPPROTO_UDP)
		return false;
	if (v4)
		address_v4(&peer->address, ctx->user_ip4);
	else
		address_v6(&peer->address, ctx->user_ip6);
	peer->port = (__be16)ctx->user_port;
	peer->protocol = (u8)ctx->protocol;
	return true;
}

static __always_inline int peer_rewrite(struct bpf_sock_addr *ctx, bool v4,
					const struct service_key *peer)
{
	if (v4) {
		ctx->user_ip4 = peer->address.word[3];
	} else {
		ctx->user_ip6[0] = peer->address.word[0];
		ctx->user_ip6[1] = peer->address.word[1];
		ctx->user_ip6[2] = peer->address.word[2];
		ctx->user_ip6[3] = peer->address.word[3];
	}
	ctx->user_port = peer->port;
	return CONTINUE;
}

/* connect() and sendmsg(). `translate` selects the endpoint. */
#define HOOK(name, v4, translate)                                                                  \
	int name(struct bpf_sock_addr *ctx)                                                        \
	{                                                                                          \
		struct service_key peer = {}, to = {};                                             \
		struct happening what = {};                                                        \
		enum verdict verdict;                                                              \
		u64 netns_cookie;                                                                  \
                                                                                                   \
		if (!peer_read(ctx, v4, &peer))                                                    \
			return CONTINUE;                                                           \
		netns_cookie = bpf_get_netns_cookie(ctx);                                          \
		verdict = translate(&peer, &to, netns_cookie, bpf_get_socket_cookie(ctx), ctx->sk, \
				    &what);                                                        \
		socket_event(&what, netns_cookie, &peer, &to);                                     \
		if (verdict == REFUSED)                                                            \
			return fail(ECONNREFUSED);                                                 \
		return verdict == TRANSLATED ? peer_rewrite(ctx, v4, &to) : CONTINUE;              \
	}

HOOK(connect4, true, socket_connect)
HOOK(connect6, false, socket_connect)
HOOK(sendmsg4, true, socket_send)
HOOK(sendmsg6, false, socket_send)

/* recvmsg() and getpeername(). `datagram`: the peer is the sender of a datagram. */
static __always_inline int restore_peer(struct bpf_sock_addr *ctx, bool v4, bool datagram)
{
	struct service_key peer = {};

	return peer_read(ctx, v4, &peer) &&
		       socket_restore_frontend(&peer, bpf_get_socket_cookie(ctx), datagram)
		   ? peer_rewrite(ctx, v4, &peer)
		   : CONTINUE;
}

#define REVERSE_HOOK(name, v4, datagram)                                                           \
	int name(struct bpf_sock_addr *ctx)                                                        \
	{                                                                                          \
		return restore_peer(ctx, v4, datagram);                                            \
	}

REVERSE_HOOK(recvmsg4, true, true)
REVERSE_HOOK(recvmsg6, false, true)
REVERSE_HOOK(getpeername4, true, false)
REVERSE_HOOK(getpeername6, false, false)

static __always_inline int bind_checked(struct bpf_sock *ctx, bool v4)
{
	struct service_key bound = {.protocol = (u8)ctx->protocol};

	if (v4)
		address_v4(&bound.address, ctx->src_ip4);
	else
		address_v6(&bound.address, ctx->src_ip6);
	bound.port = bpf_htons((u16)ctx->src_port);
	return socket_bind(&bound, bpf_get_netns_cookie(ctx)) ? CONTINUE : fail(EADDRINUSE);
}

int post_bind4(struct bpf_sock *ctx)
{
	return bind_checked(ctx, true);
}

int post_bind6(struct bpf_sock *ctx)
{
	return bind_checked(ctx, false);
}

int sock_release(struct bpf_sock *ctx)
{
	if (ctx->protocol == IPPROTO_TCP || ctx->protocol == IPPROTO_UDP)
		peer_remove(bpf_get_socket_cookie(ctx));
	return CONTINUE;
}
