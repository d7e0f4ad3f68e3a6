/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * Finds the Service of a destination address, and selects one of its endpoints.
 */
#pragma once

#include "maps.h"
#include "addr.h"
#include "event.h"

#define NSEC_PER_SEC 1000000000ULL

/* Copies `found`, the result of a lookup of `key`. Returns false if the entry no longer exists.
 *
 * The kernel immediately reuses a replaced element for another key, so `found` may become the entry
 * of another Service during the copy. A second lookup that returns the same element shows that it
 * did not.
 */
static __always_inline bool service_copy(struct service_key *key, struct service *found,
					 struct service *copy)
{
#pragma nounroll
	for (int attempt = 0; attempt < 3; again(attempt, 1)) {
		struct service *before = found;

		*copy = *found;
		barrier();
		found = services.lookup(key);
		if (found == before)
			return true;
		if (!found)
			return false;
	}
	count(COUNTER_INCONSISTENT);
	return false;
}

static __always_inline u32 port_line(u8 protocol)
{
	if (protocol == IPPROTO_TCP)
		return PORTS_TCP;
	return protocol == IPPROTO_UDP ? PORTS_UDP : PORTS_SCTP;
}

/* Whether any frontend has this port. `first_line` is NODE_PORT_LINES for NodePorts and 0 for all
 * other frontends.
 */
static __always_inline bool port_is_served(u8 protocol, __be16 port, u32 first_line)
{
	u32 number = bpf_ntohs(port);
	WORD_KEY(word, (first_line + port_line(protocol)) * SERVICE_PORT_LINE + number / 64);
	u64 *bits = service_ports.lookup(word);

	return bits && *bits >> (number % 64) & 1;
}

static __always_inline u32 network_flags(const struct address *address)
{
	WORD_STRUCT(struct network_key, key);
	u32 *flags;

	key->length = 128;
	key->address = *address;
	flags = local_networks.lookup(key);
	return flags ? *flags : 0;
}

/* Whether connections to the address are rejected if no Service has it. */
static __always_inline bool is_in_service_cidr(const struct address *address)
{
	const struct node *settings = node_get();

	if (!settings)
		return false;
	if (address_is_v4(address)) {
		if ((address->word[3] & settings->service_mask4) != settings->service_cidrs4)
			return false;
	} else if ((*(const u64 *)address & settings->service_mask6) != settings->service_cidrs6) {
		return false;
	}
	return network_flags(address) & NETWORK_SERVICE_CIDR;
}

/* Whether NodePorts are served at the loopback address of this family. A connection to the
 * unspecified address reaches loopback: after the hook, tcp_v4_connect() and others replace the
 * address by INADDR_LOOPBACK or in6addr_loopback.
 */
static __always_inline bool node_ports_on_loopback(const struct address *unspecified)
{
	struct address loopback = *unspecified;

	loopback.word[3] = address_is_v4(unspecified) ? bpf_htonl(0x7f000001) : bpf_htonl(1);
	return network_flags(&loopback) & NETWORK_NODE_PORTS;
}

/* Returns the entry of the frontend `destination`, or else of the NodePort with its port, and sets
 * `key` to the key of the entry. Returns NULL if there is none. The caller checks whether NodePorts
 * are served at the address.
 */
static __always_inline struct service *service_lookup(struct service_key *key,
						      const struct service_key *destination)
{
	struct service *found = NULL;

	*key = *destination;
	if (port_is_served(destination->protocol, destination->port, 0))
		found = services.lookup(key);
	if (found || !port_is_served(destination->protocol, destination->port, NODE_PORT_LINES))
		return found;
	address_unspecified_like(&key->address, &destination->address);
	return services.lookup(key);
}

/* Finds the Service that a client reaches at `destination`, and copies its entry. `on_node`: the
 * client is the node itself. Loopback addresses of pods belong to the pods: a tenant may write
 * 127.0.0.1 into the status of a load balancer or into a hostIP.
 */
static __always_inline bool service_find(const struct service_key *destination, bool on_node,
					 struct service *service)
{
	WORD_STRUCT(struct service_key, key);
	struct service *found = service_lookup(key, destination);

	if (!found || (!on_node && address_is_loopback(&destination->address)))
		return false;
	if (address_is_unspecified(&destination->address)) {
		if (!on_node || !node_ports_on_loopback(&destination->address))
			return false;
	} else if (address_is_unspecified(&key->address)) {
		if (!(network_flags(&destination->address) & NETWORK_NODE_PORTS))
			return false;
	}
	return service_copy(key, found, service);
}

static __always_inline struct endpoint *endpoint_get(u32 id)
{
	WORD_KEY(key, id);

	return endpoints.lookup(key);
}

static __always_inline u32 *slot_get(u32 slot)
{
	WORD_KEY(key, slot / 2);
	struct slot_pair *pair = slots.lookup(key);

	return pair ? &pair->endpoint_id[slot & 1] : NULL;
}

/* Returns the endpoint `id` if it belongs to `service` and has one of `flags`, otherwise NULL. */
static __always_inline struct endpoint *endpoint_of(const struct service *service, u32 id,
						    u16 flags)
{
	struct endpoint *endpoint = endpoint_get(id);

	if (!endpoint || endpoint->service_id != service->id || !(endpoint->flags & flags))
		return NULL;
	return endpoint;
}

/* Returns the endpoint `id`, or NULL if the id belongs to another endpoint than before. */
static __always_inline struct endpoint *endpoint_same(u32 id, u32 service_id,
						      const struct address *address, __be16 port)
{
	struct endpoint *endpoint = endpoint_get(id);

	if (!endpoint || endpoint->service_id != service_id || endpoint->port != port ||
	    !address_equal(&endpoint->address, address))
		return NULL;
	return endpoint;
}

/* The hash of a client's address, or of its network namespace, and of its port. It is part of what
 * all nodes agree on: ebpfproxy/backends/ebpf/services/client_hash.py computes the same.
 */
static __always_inline u32 hash_add(u32 hash, u32 word)
{
	word *= 0xcc9e2d51;
	word = word << 15 | word >> 17;
	hash ^= word * 0x1b873593;
	hash = hash << 13 | hash >> 19;
	return hash * 5 + 0xe6546b64;
}

static __always_inline u32 client_hash(const struct address *client, __be16 port)
{
	u32 hash = CLIENT_HASH_SEED; /* the same on all nodes */

	hash = hash_add(hash, bpf_ntohl(client->word[0]));
	hash = hash_add(hash, bpf_ntohl(client->word[1]));
	hash = hash_add(hash, bpf_ntohl(client->word[2]));
	hash = hash_add(hash, bpf_ntohl(client->word[3]));
	hash = hash_add(hash, bpf_ntohs(port));
	hash ^= hash >> 16;
	hash *= 0x85ebca6b;
	hash ^= hash >> 13;
	hash *= 0xc2b2ae35;
	return hash ^ hash >> 16;
}

/* Returns the flag of the endpoints that clients with this traffic policy can use. */
static __always_inline u16 usable_flag(const struct service *service, enum service_flag local)
{
	return service->flags & local ? ENDPOINT_LOCAL : ENDPOINT_CLUSTER;
}

/* Returns the number of the next turn of the list `range`. CPUs that select at the same time may
 * get the same number: kernels before 5.12 have no atomic operation that returns the previous
 * value.
 */
static __always_inline u32 next_turn(const struct slot_range *range)
{
	u32 *turn = slot_get(range->first + range->count);
	u32 number = 0;

	if (turn) {
		number = *(volatile u32 *)turn;
		__sync_fetch_and_add(turn, 1);
	}
	return number;
}

/* Returns the slot of `range` at `number` of 2^32. */
static __always_inline u32 slot_at(const struct slot_range *range, u32 number)
{
	return range->first + (u32)(((u64)number * range->count) >> 32);
}

/* Returns the endpoint in a slot and sets `id`. Returns NULL if the endpoint belongs to another
 * Service: no connection is better than one to the wrong Service.
 */
static __always_inline struct endpoint *endpoint_in(const struct service *service, u32 slot,
						    u32 *id)
{
	u32 *chosen = slot_get(slot);
	struct endpoint *endpoint;

	if (!chosen)
		return NULL;
	*id = *chosen;
	endpoint = endpoint_get(*id);
	if (!endpoint || endpoint->service_id != service->id)
		return NULL;
	return endpoint;
}

/* Returns the number of open connections of an endpoint, as far as it is known. CPUs that count
 * down at the same time may set it below 0, which counts as 0.
 */
static __always_inline u64 connections_of(u32 id)
{
	WORD_KEY(key, id);
	u32 *number = connections.lookup(key);
	u32 found = number ? *number : 0;

	return found & ~(u32)((s32)found >> 31);
}

/* The number of open connections of the endpoint in a slot, and its weight. */
struct load {
	u64 connections;
	u32 weight;
};

static __always_inline void load_of(u32 slot, struct load *load)
{
	u32 *chosen = slot_get(slot);
	struct endpoint *endpoint;
	u32 id;

	load->connections = 0;
	load->weight = 1;
	if (!chosen)
		return;
	id = *chosen;
	load->connections = connections_of(id);
	endpoint = endpoint_get(id);
	if (endpoint && endpoint->flags >> ENDPOINT_WEIGHT_SHIFT)
		load->weight = endpoint->flags >> ENDPOINT_WEIGHT_SHIFT;
}

/* Returns that of two slots whose endpoint has fewer open connections, relative to its weight. If
 * both are random, this is the "power of two choices".
 */
static __always_inline u32 less_used(u32 slot, u32 other_slot)
{
	struct load load, other;

	load_of(slot, &load);
	load_of(other_slot, &other);
	return load.connections * other.weight <= other.connections * load.weight ? slot
										  : other_slot;
}

/* Changes the number of open connections of an endpoint, if it is counted. */
static __always_inline void connections_add(u32 id, s32 change)
{
	WORD_KEY(key, id);
	u32 *number = connections.lookup(key);

	if (number && (change > 0 || *number))
		__sync_fetch_and_add(number, change);
}

static __always_inline u64 *new_endpoint_get(u32 id)
{
	WORD_KEY(key, id);

	return new_endpoints.lookup(key);
}

/* Whether a new connection may use the endpoint in a slot. During slow start the probability grows
 * linearly from 0 to 1.
 */
static __always_inline bool admits_connection(const struct service *service, u32 slot)
{
	u32 *id = slot_get(slot);
	u64 *added, age, end;

	if (!id)
		return true;
	added = new_endpoint_get(*id);
	if (!added)
		return true;
	end = service->slow_start * NSEC_PER_SEC;
	age = bpf_ktime_get_ns() - *added;
	/* In units of 1.05 ms, with a random number of 20 bits: the product has 64 bits at most. */
	return age >= end || (u64)(bpf_get_prandom_u32() >> 12) * (end >> 20) >> 20 < age >> 20;
}

#define SLOW_START_TRIES 4

/* Returns the client's hash, if the algorithm of the Service selects by it. `port`: see
 * endpoint_choose(). Sets `hashed` to whether it does.
 */
static __always_inline u32 hash_for_algorithm(const struct service *service,
					      const struct address *client, __be16 port,
					      bool *hashed)
{
	bool by_port = service->algorithm == ALGORITHM_MAGLEV && port;

	*hashed = by_port || service->algorithm == ALGORITHM_SOURCE_HASH;
	return *hashed ? client_hash(client, by_port ? port : 0) : 0;
}

static __always_inline u32 slot_by_algorithm(const struct service *service,
					     const struct slot_range *range, bool hashed, u32 hash)
{
	if (service->algorithm == ALGORITHM_ROUND_ROBIN)
		return range->first + next_turn(range) % range->count;
	if (service->algorithm == ALGORITHM_LEAST_CONNECTIONS)
		return less_used(slot_at(range, bpf_get_prandom_u32()),
				 slot_at(range, bpf_get_prandom_u32()));
	return slot_at(range, hashed ? hash : bpf_get_prandom_u32());
}

/* Selects an endpoint of `range` by the algorithm of the Service, and sets `id`. With slow start,
 * it selects again if the endpoint admits no connection, a few times. Returns NULL if the range is
 * empty, or as endpoint_in().
 */
static __always_inline struct endpoint *endpoint_select(const struct service *service,
							const struct slot_range *range,
							const struct address *client, __be16 port,
							u32 *id)
{
	u32 slot = 0, hash;
	bool hashed;

	if (!range->count)
		return NULL;
	hash = hash_for_algorithm(service, client, port, &hashed);
#pragma unroll
	for (u32 try = 0; try < SLOW_START_TRIES; try++) {
		slot = slot_by_algorithm(service, range, hashed, hash);
		if (!service->slow_start || admits_connection(service, slot))
			break;
	}
	return endpoint_in(service, slot, id);
}

/* Selects the endpoint for a new connection of `client`. With session affinity this is the client's
 * previous endpoint, if the timeout has not passed and the endpoint has one of `flags`. Otherwise
 * the algorithm of the Service selects an endpoint of `range`. `port` is the client's port, 0 if it
 * is not known yet. `uses` gets the flags of an event that describe this.
 */
static __always_inline struct endpoint *endpoint_choose(const struct service *service,
							const struct slot_range *range, u16 flags,
							struct affinity_key *client, __be16 port,
							u32 *id, u16 *uses)
{
	struct affinity fresh = {};
	struct affinity *known = NULL;
	struct endpoint *endpoint;

	if (service->affinity_timeout) {
		fresh.last_used = bpf_ktime_get_ns();
		known = affinity.lookup(client);
	}
	/* Signed, because another CPU may have written a later time than this CPU has read. */
	if (known && (s64)(fresh.last_used - known->last_used) <
			 (s64)(service->affinity_timeout * NSEC_PER_SEC)) {
		*id = known->endpoint;
		endpoint = endpoint_of(service, *id, flags);
		if (endpoint) {
			known->last_used = fresh.last_used;
			*uses |= EVENT_AFFINITY_USED;
			return endpoint;
		}
	}
	endpoint = endpoint_select(service, range, &client->client, port, id);
	if (endpoint && fresh.last_used) {
		fresh.endpoint = *id;
		affinity.update(client, &fresh);
		*uses |= EVENT_AFFINITY_SET;
	}
	return endpoint;
}
