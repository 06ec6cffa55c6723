/* SPDX-License-Identifier: Apache-2.0 */
/* Written by exocell-xgate-abi; its test `header_is_current` keeps it equal. */
#ifndef EXOCELL_ABI_H
#define EXOCELL_ABI_H

#define EXOCELL_ABI_VERSION 1u

/* A handle is 64 bits: slot below, generation above. */
#define EXOCELL_HANDLE_NULL 0ull
#define EXOCELL_HANDLE_GENERATION_SHIFT 32

#define EXOCELL_KIND_FOLDER 1u
#define EXOCELL_KIND_NETWORK 2u
#define EXOCELL_KIND_MEMORY 3u
#define EXOCELL_KIND_CPU 4u
#define EXOCELL_KIND_DISK 5u
#define EXOCELL_KIND_PROCESSES 6u
#define EXOCELL_KIND_TIME 7u
#define EXOCELL_KIND_CLOCK 8u
#define EXOCELL_KIND_RANDOM 9u
#define EXOCELL_KIND_STDIO 10u
#define EXOCELL_KIND_DEVICE 11u
#define EXOCELL_KIND_SPAWN 12u
#define EXOCELL_KIND_FUEL 13u

#define EXOCELL_RIGHT_READ 0x1u
#define EXOCELL_RIGHT_WRITE 0x2u
#define EXOCELL_RIGHT_EXECUTE 0x4u
#define EXOCELL_RIGHT_CONNECT 0x8u
#define EXOCELL_RIGHT_LISTEN 0x10u
#define EXOCELL_RIGHT_RESOLVE 0x20u
#define EXOCELL_RIGHT_USE 0x40u
#define EXOCELL_RIGHT_OVERLAY 0x80u

#define EXOCELL_STATUS_OK (0)
#define EXOCELL_STATUS_FULL (-1)
#define EXOCELL_STATUS_NOT_PRESENT (-2)
#define EXOCELL_STATUS_WRONG_KIND (-3)
#define EXOCELL_STATUS_DENIED (-4)
#define EXOCELL_STATUS_INVALID (-5)

#endif
