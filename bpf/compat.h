/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * What the kernel's headers would have given and user space's do not.
 */
#pragma once

#ifndef AF_INET
#define AF_INET	 2
#define AF_INET6 10
#endif

#ifndef barrier
#define barrier() asm volatile("" ::: "memory")
#endif

#ifndef NULL
#define NULL ((void *)0)
#endif

#ifndef ECONNREFUSED
#define EADDRINUSE   98
#define ECONNREFUSED 111
#endif

/* Keep the compiler from knowing a value, so that it makes the very comparison that the verifier is
 * to see, and not one that comes to the same.
 */
#define hide(value) asm volatile("" : "+r"(value))

/* Of bytes on the stack that are also written in words. */
#define ALIGNED __attribute__((aligned(4)))
