// What a program must not notice when its system calls are replaced by jumps: a line for
// each check, "ok" or what is wrong. Each site is executed several times: by a trap, then
// by the jump. Prints the same on a machine of its own.

#define _GNU_SOURCE
#include <asm/prctl.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>

enum { TIMES = 5000 };

// Both forms of sites, with labels at the instructions that a jump may lie over.
extern long moved(long number), numbered(void), enter_numbered(long number);
extern long enter_tail(long result), below(void), kept(uint64_t *registers);
extern const char moved_call[], moved_tail[], numbered_call[], sites_end[], moved_start[];
__asm__(".text\n.balign 256\n.skip 128, 0x90\n"
	"moved: moved_start: mov %rdi, %rax\n"
	"moved_call: syscall\n"
	"moved_tail: cmp $-4095, %rax\n"
	"jae 1f\n ret\n1: mov $-1000, %rax\n ret\n"
	".balign 128\n.skip 96, 0x90\n"
	"numbered: mov $39, %eax\n"
	"numbered_call: syscall\n"
	"ret\n"
	".balign 128\n"
	"enter_numbered: mov %rdi, %rax\n jmp *numbered_address(%rip)\n"
	"enter_tail: mov %rdi, %rax\n jmp *tail_address(%rip)\n"
	// The 128 bytes below the stack are the function's.
	"below: mov $0x1122334455667788, %rdx\n"
	"mov %rdx, -8(%rsp)\n mov %rdx, -128(%rsp)\n"
	"mov $39, %eax\n syscall\n"
	"mov %rax, %rcx\n xor %eax, %eax\n"
	"cmp %rdx, -8(%rsp)\n jne 1f\n cmp %rdx, -128(%rsp)\n jne 1f\n mov $1, %eax\n1: ret\n"
	// Calls with the 16 values at rdi in registers, and writes them back.
	"kept: push %rbx\n push %rbp\n push %r12\n push %r13\n push %r14\n push %r15\n push %rdi\n"
	"mov (%rdi), %rbx\n mov 8(%rdi), %rbp\n mov 16(%rdi), %r12\n mov 24(%rdi), %r13\n"
	"mov 32(%rdi), %r14\n mov 40(%rdi), %r15\n mov 48(%rdi), %rsi\n mov 56(%rdi), %rdx\n"
	"mov 64(%rdi), %r8\n mov 72(%rdi), %r9\n mov 80(%rdi), %r10\n"
	"movups 88(%rdi), %xmm0\n movups 104(%rdi), %xmm7\n movups 120(%rdi), %xmm15\n"
	"mov $186, %eax\n std\n stc\n syscall\n"
	"pushf\n cld\n"
	"mov 8(%rsp), %rdi\n"
	"mov %rbx, (%rdi)\n mov %rbp, 8(%rdi)\n mov %r12, 16(%rdi)\n mov %r13, 24(%rdi)\n"
	"mov %r14, 32(%rdi)\n mov %r15, 40(%rdi)\n mov %rsi, 48(%rdi)\n mov %rdx, 56(%rdi)\n"
	"mov %r8, 64(%rdi)\n mov %r9, 72(%rdi)\n mov %r10, 80(%rdi)\n"
	"movups %xmm0, 88(%rdi)\n movups %xmm7, 104(%rdi)\n movups %xmm15, 120(%rdi)\n"
	"pop %rax\n and $0x401, %eax\n"
	"pop %rdi\n pop %r15\n pop %r14\n pop %r13\n pop %r12\n pop %rbp\n pop %rbx\n ret\n"
	"sites_end:\n"
	".data\nnumbered_address: .quad numbered_call\ntail_address: .quad moved_tail\n.text\n");

static void say(const char *what, int is_right)
{
	printf("%s: %s\n", what, is_right ? "ok" : "wrong");
}

static void sites(void)
{
	int right = 0;

	for (int n = 0; n < TIMES; n++)
		right += moved(SYS_getpid) == getpid() && moved(SYS_getppid) == getppid() &&
			 moved(-1) == -1000 && numbered() == getpid();
	say("calls", right == TIMES);
	for (int n = right = 0; n < TIMES; n++)
		right += enter_numbered(SYS_getppid) == getppid() &&
			 enter_numbered(SYS_getpid) == getpid();
	say("jumps to a call behind its number", right == TIMES);
	for (int n = right = 0; n < TIMES; n++)
		right += enter_tail(-38) == -1000 && enter_tail(n) == n;
	say("jumps to what follows a call", right == TIMES);
	for (int n = right = 0; n < TIMES; n++)
		right += below() == 1;
	say("memory below the stack", right == TIMES);
}

static void on_tick(int sig)
{
	(void)sig;
}

static void registers(void)
{
	struct itimerval often = { { 0, 500 }, { 0, 500 } }, never = { 0 };
	int right = 0;

	signal(SIGALRM, on_tick);
	setitimer(ITIMER_REAL, &often, NULL);
	for (int n = 0; n < 40 * TIMES; n++) {
		uint64_t values[17], before[17];

		for (int i = 0; i < 17; i++)
			before[i] = values[i] = (n + 1) * 0x9e3779b97f4a7c15UL * (i + 1);
		right += kept(values) == 0x401 && !memcmp(values, before, sizeof(values));
	}
	setitimer(ITIMER_REAL, &never, NULL);
	say("registers", right == 40 * TIMES);
}

static volatile uintptr_t seen;

static void on_signal(int sig, siginfo_t *info, void *context)
{
	(void)sig, (void)info;
	seen = ((ucontext_t *)context)->uc_mcontext.gregs[REG_RIP];
}

// A call that waits for a pipe is begun again after a signal, or ends with EINTR.
static void restarts(int flags, const char *what)
{
	struct sigaction action = { .sa_sigaction = on_signal, .sa_flags = SA_SIGINFO | flags };
	int right = 0;

	sigaction(SIGUSR1, &action, NULL);
	for (int n = 0; n < 3; n++) {
		int pipes[2];
		char byte = 0;
		long got;

		pipe(pipes);
		seen = 0;
		if (fork() == 0) {
			usleep(20000);
			kill(getppid(), SIGUSR1);
			usleep(20000);
			write(pipes[1], "x", 1);
			_exit(0);
		}
		register long a __asm__("rdi") = pipes[0];
		register char *b __asm__("rsi") = &byte;
		register long c __asm__("rdx") = 1;
		__asm__ volatile("mov $0, %%eax\n\tsyscall\n\tcmp $-4095, %%rax"
				 : "=a"(got) : "r"(a), "r"(b), "r"(c) : "rcx", "r11", "memory");
		right += flags ? got == 1 && byte == 'x' : got == -4;
		wait(NULL);
		close(pipes[0]);
		close(pipes[1]);
	}
	say(what, right == 3 && seen != 0);
}

static void addresses(void)
{
	struct sigaction action = { .sa_sigaction = on_signal, .sa_flags = SA_SIGINFO };
	int right = 0;

	sigaction(SIGUSR2, &action, NULL);
	for (int n = 0; n < 3; n++) {
		seen = 0;
		register long pid __asm__("rdi") = getpid();
		register long sig __asm__("rsi") = SIGUSR2;
		uintptr_t after;
		long result;

		__asm__ volatile("mov $62, %%eax\n\tsyscall\n1:\tlea 1b(%%rip), %1"
				 : "=a"(result), "=r"(after) : "r"(pid), "r"(sig)
				 : "rcx", "r11", "memory");
		right += result == 0 && seen == after;
	}
	say("addresses in signals", right == 3);
}

// The file, and what others see of the program, is as it was.
static void text(void)
{
	unsigned char code[4096];
	size_t bytes = sites_end - moved_start;
	int memory = open("/proc/self/mem", O_RDONLY);
	long got = pread(memory, code, bytes, (off_t)moved_start);

	close(memory);
	say("memory file", got == (long)bytes && !memcmp(code + 3, "\x0f\x05\x48\x3d", 4));
}

// A page that the program writes code to itself
static void written(void)
{
	static const unsigned char code[] = { 0xb8, 39, 0, 0, 0, 0x0f, 0x05, 0xc3 };
	unsigned char *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE | PROT_EXEC,
				   MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	int right = 0;

	for (int n = 0; n < 100; n++) {
		memcpy(page, code, sizeof(code));
		page[1] = n % 2 ? SYS_getpid : SYS_getppid;
		right += ((long (*)(void))page)() == (n % 2 ? getpid() : getppid());
	}
	munmap(page, 4096);
	say("code that was just written", right == 100);
}

// Sites at which a thread calls for the first time while others call at those before.
enum { FRESH = 24, FRESH_SIZE = 128, THREADS = 3 };
extern const char fresh[];
__asm__(".text\n.balign 4096\n.skip 96, 0x90\n"
	"fresh: .rept 24\n mov $39, %eax\n syscall\n ret\n .balign 32, 0x90\n"
	".skip 96, 0x90\n.endr\n");
static volatile int opened, wrong;

static long call_fresh(int site)
{
	return ((long (*)(void))((uintptr_t)fresh + (uintptr_t)site * FRESH_SIZE))();
}

static void *call_opened(void *unused)
{
	long self = getpid();

	while (opened < FRESH)
		for (int site = 0; site < opened; site++)
			if (call_fresh(site) != self)
				wrong++;
	return unused;
}

static void threads(void)
{
	pthread_t others[THREADS];

	for (int n = 0; n < THREADS; n++)
		pthread_create(&others[n], NULL, call_opened, NULL);
	for (; opened < FRESH; opened++) {
		for (int n = 0; n < 3; n++)
			if (call_fresh(opened) != getpid())
				wrong++;
		usleep(1000);
	}
	for (int n = 0; n < THREADS; n++)
		pthread_join(others[n], NULL);
	say("sites that threads share", wrong == 0);
}

static long at_gs(void)
{
	long value;

	__asm__ volatile ("mov %%gs:0, %0" : "=r" (value));
	return value;
}

// A program may have a GS base of its own, which calls and signals leave alone.
static void own_base(void)
{
	struct itimerval often = { { 0, 500 }, { 0, 500 } }, never = { 0 };
	static long value = 0x1234;
	unsigned long base = 0;
	int right = 0, status = 1;

	signal(SIGALRM, on_tick);
	syscall(SYS_arch_prctl, ARCH_SET_GS, &value);
	setitimer(ITIMER_REAL, &often, NULL);
	for (int n = 0; n < TIMES; n++)
		right += numbered() == getpid() && at_gs() == value;
	setitimer(ITIMER_REAL, &never, NULL);
	if (fork() == 0)
		_exit(numbered() != getpid() || at_gs() != value);
	wait(&status);
	syscall(SYS_arch_prctl, ARCH_GET_GS, &base);
	say("a base of its own", right == TIMES && status == 0 &&
	    base == (unsigned long)&value);
}

int main(void)
{
	setbuf(stdout, NULL);
	sites();
	registers();
	restarts(SA_RESTART, "a call begun again");
	restarts(0, "a call interrupted");
	addresses();
	text();
	written();
	threads();
	own_base();
	return 0;
}
