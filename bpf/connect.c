// SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
/*
 * The cgroup socket hooks: connect, sendmsg, recvmsg, getpeername, post_bind, sock_release. Each
 * reads its context and calls one function of socket.h.
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

static __always_inline bool sock4_read_peer(struct bpf_sock_addr *ctx, struct service_key *peer)
{
	if (ctx->protocol != IPPROTO_TCP && ctx->protocol != IPPROTO_UDP)
		return false;
	address_v4(&peer->address, ctx->user_ip4);
	peer->port = (__be16)ctx->user_port;
	peer->protocol = (u8)ctx->protocol;
	return true;
}

static __always_inline bool sock6_read_peer(struct bpf_sock_addr *ctx, struct service_key *peer)
{
	if (ctx->protocol != IPPROTO_TCP && ctx->protocol != IPPROTO_UDP)
		return false;
	peer->address.word[0] = ctx->user_ip6[0];
	peer->address.word[1] = ctx->user_ip6[1];
	peer->address.word[2] = ctx->user_ip6[2];
	peer->address.word[3] = ctx->user_ip6[3];
	peer->port = (__be16)ctx->user_port;
	peer->protocol = (u8)ctx->protocol;
	return true;
}

static __always_inline int sock4_rewrite_peer(struct bpf_sock_addr *ctx,
					      const struct service_key *peer)
{
	ctx->user_ip4 = peer->address.word[3];
	ctx->user_port = peer->port;
	return CONTINUE;
}

static __always_inline int sock6_rewrite_peer(struct bpf_sock_addr *ctx,
					      const struct service_key *peer)
{
	ctx->user_ip6[0] = peer->address.word[0];
	ctx->user_ip6[1] = peer->address.word[1];
	ctx->user_ip6[2] = peer->address.word[2];
	ctx->user_ip6[3] = peer->address.word[3];
	ctx->user_port = peer->port;
	return CONTINUE;
}

#define HOOK(name, family, act)                                                                    \
	int name(struct bpf_sock_addr *ctx)                                                        \
	{                                                                                          \
		struct service_key peer = {};                                                      \
                                                                                                   \
		if (!sock##family##_read_peer(ctx, &peer))                                         \
			return CONTINUE;                                                           \
		switch (                                                                           \
		    act(&peer, bpf_get_netns_cookie(ctx), bpf_get_socket_cookie(ctx), ctx->sk)) {  \
		case TRANSLATED:                                                                   \
			return sock##family##_rewrite_peer(ctx, &peer);                            \
		case REFUSED:                                                                      \
			return fail(ECONNREFUSED);                                                 \
		default:                                                                           \
			return CONTINUE;                                                           \
		}                                                                                  \
	}

HOOK(connect4, 4, socket_connect)
HOOK(connect6, 6, socket_connect)
HOOK(sendmsg4, 4, socket_send)
HOOK(sendmsg6, 6, socket_send)

#define REVERSE_HOOK(name, family, datagram)                                                       \
	int name(struct bpf_sock_addr *ctx)                                                        \
	{                                                                                          \
		struct service_key peer = {};                                                      \
                                                                                                   \
		if (!sock##family##_read_peer(ctx, &peer))                                         \
			return CONTINUE;                                                           \
		if (socket_restore_frontend(&peer, bpf_get_socket_cookie(ctx), datagram))          \
			return sock##family##_rewrite_peer(ctx, &peer);                            \
		return CONTINUE;                                                                   \
	}

REVERSE_HOOK(recvmsg4, 4, true)
REVERSE_HOOK(recvmsg6, 6, true)
REVERSE_HOOK(getpeername4, 4, false)
REVERSE_HOOK(getpeername6, 6, false)

int post_bind4(struct bpf_sock *ctx)
{
	struct service_key bound = {.protocol = (u8)ctx->protocol};

	address_v4(&bound.address, ctx->src_ip4);
	bound.port = bpf_htons((u16)ctx->src_port);
	return socket_bind(&bound, bpf_get_netns_cookie(ctx)) ? CONTINUE : fail(EADDRINUSE);
}

int post_bind6(struct bpf_sock *ctx)
{
	struct service_key bound = {.protocol = (u8)ctx->protocol};

	bound.address.word[0] = ctx->src_ip6[0];
	bound.address.word[1] = ctx->src_ip6[1];
	bound.address.word[2] = ctx->src_ip6[2];
	bound.address.word[3] = ctx->src_ip6[3];
	bound.port = bpf_htons((u16)ctx->src_port);
	return socket_bind(&bound, bpf_get_netns_cookie(ctx)) ? CONTINUE : fail(EADDRINUSE);
}

int sock_release(struct bpf_sock *ctx)
{
	if (ctx->protocol == IPPROTO_TCP || ctx->protocol == IPPROTO_UDP)
		peer_remove(bpf_get_socket_cookie(ctx));
	return CONTINUE;
}
