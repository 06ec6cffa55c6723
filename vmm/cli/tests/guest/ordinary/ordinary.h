/* What an ordinary user tries: each case says in a line how it went. */
#ifndef ORDINARY_H
#define ORDINARY_H
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096UL
/* How long threads are in each other's way. */
#define SECONDS 3
/* A file that is root's, which others may read and execute. */
#define FILE_OF_ROOT "/usr/bin/su"

/* What a case found, for its line. */
extern char found[160];
extern volatile int is_over;

/* Runs @threads with each other, until is_over, for SECONDS or until one @is_won. */
void race(void *(**threads)(void *), int count, int (*is_won)(void));

/* The cases: 0 held, 1 broken. */
int page_of_anothers_file(void);
int page_read_ahead(void);
int munmap_beside_read(void);
int odd_stacks(void);
int odd_registers(void);
int no_access(void);

#endif
