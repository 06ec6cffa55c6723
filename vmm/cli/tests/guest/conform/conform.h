/* Facts that a program can observe, one a line; compared between two kernels. */
#ifndef CONFORM_H
#define CONFORM_H
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#define PAGE 4096UL
#define ANON (MAP_PRIVATE | MAP_ANONYMOUS)
#define RW (PROT_READ | PROT_WRITE)

struct fact {
	const char *name;
	/* Says what it observed; runs in a process of its own. */
	void (*observe)(void);
};

/* Each file ends its list with an entry without a name. */
extern const struct fact memory[], signals[], floats[], processes[], tracing[], timers[], files[],
	children[];

/* One line of the running fact: no addresses, ids or times in it. */
__attribute__((format(printf, 1, 2))) void say(const char *format, ...);
/* `result` of a call, as `ok` or errno's name. */
void say_call(const char *what, long result);
/* A description of a wait status. */
const char *status_text(int status);
/* Waits for a child and says how it ended. */
void say_end(pid_t child);
/* Runs `body` in a child; its pid. */
pid_t child_of(void (*body)(void));
/* A new temporary file without a name. */
int scratch_file(void);
/* What this copy of the program has in the place of a digit. */
int marker_digit(void);

#endif
