/* What the attacks on protection keys share. */
#ifndef KEYS_H
#define KEYS_H
#define _GNU_SOURCE
#include <cpuid.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>
#include "../shared/faults.h"

#define PAGE 4096UL
/* Where an attack wants a page of the host, and where its code is. */
#define TARGET 0x20000000UL
#define CODE 0x30000000UL
#define SITES_MAX 512

/* PKRU of the guest kernel, and what would open everything */
#define PKRU_KERNEL 0x55555540U
#define PKRU_OPEN 0U

struct sites {
	unsigned long at[SITES_MAX];
	int count;
};

/* Instructions in the guest kernel's text, which is readable. */
extern struct sites calls, pkru_writers, restorers;
/* Where the guest kernel's signal handler begins. */
extern unsigned long handler;
/* Pages of the guest kernel's that this process can write to. */
extern unsigned long writable[64];
extern int writable_count;
/* An address in the guest's physical memory */
extern unsigned long secret;

/*
 * xor %eax,%eax; xor %ecx,%ecx; xor %edx,%edx; wrpkru; ret. Not where they are used:
 * as parts of instructions they would keep this program from being executed.
 */
#define OPEN_KEYS 10
extern const unsigned char open_keys[OPEN_KEYS];
/* mov %rdi,%rax; wrgsbase %rax; ret */
#define SET_GS 9
extern const unsigned char set_gs[SET_GS];

void explore(void);
/* Where code that has been jumped into may lead: ends with 1 if keys are open. */
void landing(void);
/* Lets all that the guest kernel goes on with from user memory be landing(). */
void redirect(void);
/* A jump to `at` with these registers and an own stack; does not return. */
void jump(unsigned long at, unsigned long ax, unsigned long cx, unsigned long dx)
	__attribute__((noreturn));

int read_memory(void);
int write_kernel(void);
int jump_pkru(void);
int jump_pkru_32(void);
int jump_restore(void);
int jump_call(void);
int forge_signal(void);
int forge_state(void);
int own_code(void);
int own_code_across(void);
int own_code_shared(void);
int own_code_later(void);
int own_gs(void);
int clear_gs(void);
int bad_flags(void);
int bad_stack(void);
int race(void);
int execute_written(void);

#endif
