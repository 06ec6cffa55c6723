/* System calls and signals: the price of entering the kernel and coming back. */
#define _GNU_SOURCE
#include "micro.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

static uint64_t null_syscall(long count)
{
	uint64_t start = now_ns();

	for (long i = 0; i < count; i++)
		syscall(SYS_getppid);
	return now_ns() - start;
}

static uint64_t read1(long count)
{
	int fd = must(open("/dev/zero", O_RDONLY), "/dev/zero");
	char c;
	uint64_t start = now_ns();

	for (long i = 0; i < count; i++)
		must(read(fd, &c, 1), "read");
	start = now_ns() - start;
	close(fd);
	return start;
}

static uint64_t write1(long count)
{
	int fd = must(open("/dev/null", O_WRONLY), "/dev/null");
	uint64_t start = now_ns();

	for (long i = 0; i < count; i++)
		must(write(fd, "x", 1), "write");
	start = now_ns() - start;
	close(fd);
	return start;
}

static uint64_t stat_(long count)
{
	struct stat data;
	uint64_t start = now_ns();

	for (long i = 0; i < count; i++)
		must(stat(small_file, &data), "stat");
	return now_ns() - start;
}

static uint64_t open_close(long count)
{
	uint64_t start = now_ns();

	for (long i = 0; i < count; i++)
		close(must(open(small_file, O_RDONLY), "open"));
	return now_ns() - start;
}

static uint64_t clock_gettime_(long count)
{
	struct timespec t;
	uint64_t start = now_ns();

	for (long i = 0; i < count; i++)
		clock_gettime(CLOCK_MONOTONIC, &t);
	return now_ns() - start;
}

static volatile long delivered;

static void on_signal(int signal)
{
	(void)signal;
	delivered++;
}

static uint64_t sig_install(long count)
{
	struct sigaction action = { .sa_handler = on_signal };
	uint64_t start = now_ns();

	for (long i = 0; i < count; i++)
		must(sigaction(SIGUSR1, &action, NULL), "sigaction");
	return now_ns() - start;
}

/* kill(2) of itself included. */
static uint64_t sig_deliver(long count)
{
	struct sigaction action = { .sa_handler = on_signal };
	pid_t own = getpid();
	uint64_t start;

	must(sigaction(SIGUSR1, &action, NULL), "sigaction");
	delivered = 0;
	start = now_ns();
	for (long i = 0; i < count; i++)
		kill(own, SIGUSR1);
	start = now_ns() - start;
	errno = 0;
	if (delivered != count)
		fail("a signal was lost");
	return start;
}

#define STORE_LENGTH 3 /* movb $1,(%rax): c6 00 01 */

static void on_fault(int signal, siginfo_t *info, void *context)
{
	ucontext_t *at = context;

	(void)signal;
	(void)info;
	delivered++;
	at->uc_mcontext.gregs[REG_RIP] += STORE_LENGTH;
}

/* A store to a read-only page, up to the handler, and back behind the store. */
static uint64_t fault_prot(long count)
{
	struct sigaction action = { .sa_sigaction = on_fault, .sa_flags = SA_SIGINFO };
	char *page = must_map(NULL, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1);
	uint64_t start;

	must(sigaction(SIGSEGV, &action, NULL), "sigaction");
	delivered = 0;
	start = now_ns();
	for (long i = 0; i < count; i++)
		__asm__ volatile(".byte 0xc6, 0x00, 0x01" : : "a"(page) : "memory");
	start = now_ns() - start;
	munmap(page, PAGE);
	errno = 0;
	if (delivered != count)
		fail("a fault was lost");
	return start;
}

const struct measure calls[] = {
	{ "null_syscall", EACH, 1, 1 << 22, null_syscall },
	{ "read1", EACH, 1, 1 << 22, read1 },
	{ "write1", EACH, 1, 1 << 22, write1 },
	{ "stat", EACH, 1, 1 << 22, stat_ },
	{ "open_close", EACH, 1, 1 << 22, open_close },
	{ "clock_gettime", EACH, 1, 1 << 24, clock_gettime_ },
	{ "sig_install", EACH, 1, 1 << 22, sig_install },
	{ "sig_deliver", EACH, 1, 1 << 22, sig_deliver },
	{ "fault_prot", EACH, 1, 1 << 22, fault_prot },
	{ 0 },
};
