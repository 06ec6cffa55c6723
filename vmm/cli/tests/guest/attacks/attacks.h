/* What the attacks share: finding the stub, and seeing what a host call did. */
#ifndef ATTACKS_H
#define ATTACKS_H
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>
#include "../shared/faults.h"

#define PAGE 4096UL
/* Where an attack wants a page of the host; below 4 GB for 32-bit calls. */
#define TARGET 0x20000000UL
#define SITES_MAX 64
#define PAGES_MAX 256
/* Each after 2 ms: an attack that ends is over sooner, one that blocks is left. */
#define LOOKS 50
#define JUMP_STACK 1024

/* Foreign pages, those of the stub, and the call instructions in them. */
extern unsigned long pages[PAGES_MAX], sites[SITES_MAX];
extern int page_count, site_count;
/* What a case found, for its line. */
extern char found[160];
/* A stack for code that is jumped into: where it returns to. */
extern unsigned long jump_stack[JUMP_STACK];

/* Finds the foreign pages and call instructions. */
void explore(void);
/* What a child made of the attack: 0 held, 1 broken; a death is holding. */
int in_child(int (*attack)(void *), void *argument);

/* The cases: 0 held, 1 broken. */
int jump_mmap_anonymous(void);
int jump_mmap_memory(void);
int jump_mremap(void);
int int80(void);
int sysenter_(void);
int far_jump_32(void);
int vsyscall(void);
int remap_stub(void);
int write_stub_code(void);
int forge_data(void);
int forge_gate(void);
int keep_cpu_mask(void);
int keep_cpu_sigreturn(void);
int keep_cpu_sigprocmask(void);
int keep_cpu_bad_stack(void);
int poison(void);
int outlive_exit(void);
int outlive_munmap(void);

#endif
