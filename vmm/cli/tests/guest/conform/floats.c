/* Registers that must survive signals, switches and system calls. */
#include "conform.h"

#include <cpuid.h>
#include <immintrin.h>
#include <sys/auxv.h>

#define FILLED 64 /* bytes of one register */

static int has_avx512(void)
{
	unsigned a, b, c, d;

	return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_AVX512F);
}

static int has_avx(void)
{
	unsigned a, b, c, d;

	return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_AVX) && (c & bit_OSXSAVE);
}

static unsigned char want[32][FILLED], got[32][FILLED];

#define LOAD512(n) __asm__ volatile("vmovdqu64 %0, %%zmm" #n : : "m"(want[n]))
#define STORE512(n) __asm__ volatile("vmovdqu64 %%zmm" #n ", %0" : "=m"(got[n]))
#define LOAD256(n) __asm__ volatile("vmovdqu %0, %%ymm" #n : : "m"(want[n]))
#define STORE256(n) __asm__ volatile("vmovdqu %%ymm" #n ", %0" : "=m"(got[n]))
#define LOW(X) X(0); X(1); X(2); X(3); X(4); X(5); X(6); X(7); X(8); X(9); X(10); X(11); X(12); \
	X(13); X(14); X(15)
#define HIGH(X) X(16); X(17); X(18); X(19); X(20); X(21); X(22); X(23); X(24); X(25); X(26); \
	X(27); X(28); X(29); X(30); X(31)

static void load(int seed)
{
	for (int r = 0; r < 32; r++)
		for (int i = 0; i < FILLED; i++)
			want[r][i] = seed + r * 7 + i;
	if (has_avx512()) {
		LOW(LOAD512);
		HIGH(LOAD512);
	} else if (has_avx()) {
		LOW(LOAD256);
	}
}

/* How many registers are not as they were loaded. */
static int changed(void)
{
	int count = 0, registers = has_avx512() ? 32 : has_avx() ? 16 : 0;
	int bytes = has_avx512() ? 64 : 32;

	if (has_avx512()) {
		LOW(STORE512);
		HIGH(STORE512);
	} else if (has_avx()) {
		LOW(STORE256);
	}
	for (int r = 0; r < registers; r++)
		count += memcmp(want[r], got[r], bytes) != 0;
	return count;
}

static void clobber(int signal)
{
	unsigned short word = 0x0c7f;

	(void)signal;
	if (has_avx512())
		__asm__ volatile("vpternlogd $0xff, %%zmm1, %%zmm1, %%zmm1\n\t"
				 "vpxord %%zmm17, %%zmm17, %%zmm17" : : : "memory");
	if (has_avx())
		__asm__ volatile("vzeroall");
	__asm__ volatile("fldcw %0" : : "m"(word));
	__asm__ volatile("ldmxcsr %0" : : "m"((unsigned){ 0x7f80 }));
}

__attribute__((noinline)) static int across_signal(int seed)
{
	pid_t own = getpid();
	long result;

	load(seed);
	__asm__ volatile("syscall" : "=a"(result) : "a"(SYS_kill), "D"(own), "S"(SIGUSR1)
			 : "rcx", "r11", "memory");
	return changed();
}

static volatile sig_atomic_t taken;

static void take(int number)
{
	(void)number;
	taken = 1;
}

/* On a stack of the size that the system names, or of SIGSTKSZ (8192) where it names none, with a
 * little for the handler. */
static int frame_fits(void)
{
	unsigned long least = getauxval(AT_MINSIGSTKSZ), size = (least ? least : 8192) + 2048;
	stack_t stack = {.ss_sp = malloc(size), .ss_size = size}, none = {.ss_flags = SS_DISABLE};
	struct sigaction action = {.sa_handler = take, .sa_flags = SA_ONSTACK};

	if (!stack.ss_sp || sigaltstack(&stack, 0) || sigaction(SIGUSR1, &action, 0))
		return 0;
	raise(SIGUSR1);
	sigaltstack(&none, 0);
	free(stack.ss_sp);
	return taken;
}

static void signal_keeps_vectors(void)
{
	unsigned mxcsr = 0x1f80 | 0x6000, after;
	unsigned short word = 0x0e7f, word_after;
	int bad = 0;

	signal(SIGUSR1, clobber);
	for (int i = 0; i < 100; i++)
		bad += across_signal(i);
	say("vector registers changed %d", bad);
	__asm__ volatile("ldmxcsr %0\n\tfldcw %1" : : "m"(mxcsr), "m"(word));
	raise(SIGUSR1);
	__asm__ volatile("stmxcsr %0\n\tfnstcw %1" : "=m"(after), "=m"(word_after));
	say("mxcsr %x, x87 control %x", after & ~0x3f, word_after);
	say("frame fits MINSIGSTKSZ %d", frame_fits());
}

/* Processes that each hold other values take turns by sleeping and by force. */
static void switches_keep_vectors(void)
{
	int bad = 0, status;

	for (int p = 0; p < 4; p++)
		if (fork() == 0) {
			int mine = 0;

			for (int i = 0; i < 60; i++) {
				long result;
				struct timespec pause = { 0, 100000 };

				load(p * 50 + i);
				if (i & 1)
					__asm__ volatile("syscall" : "=a"(result)
							 : "a"(SYS_nanosleep), "D"(&pause), "S"(0)
							 : "rcx", "r11", "memory");
				else
					for (volatile int j = 0; j < 200000; j++)
						;
				mine += changed();
			}
			_exit(mine > 100 ? 100 : mine);
		}
	while (wait(&status) > 0)
		bad += WEXITSTATUS(status);
	say("vector registers changed %d", bad);
}

static void fork_keeps_vectors(void)
{
	long child;
	int status;

	load(9);
	__asm__ volatile("syscall" : "=a"(child) : "a"(SYS_fork) : "rcx", "r11", "memory");
	int bad = changed();
	if (child == 0)
		_exit(bad);
	waitpid(child, &status, 0);
	say("parent %d child %d", bad, WEXITSTATUS(status));
}

static void faults_keep_vectors(void)
{
	volatile char *at = mmap(NULL, 256 * PAGE, RW, ANON, -1, 0);
	int bad = 0;

	for (int i = 0; i < 256; i++) {
		load(i);
		at[i * PAGE] = 1;
		bad += changed();
	}
	say("vector registers changed %d", bad);
}

/* The frame's copy of the state can be read and changed. */
static void edit_frame(int signal, siginfo_t *info, void *context)
{
	ucontext_t *at = context;

	(void)signal;
	(void)info;
	at->uc_mcontext.fpregs->_xmm[3].element[0] ^= 0xffffffff;
	at->uc_mcontext.gregs[REG_R12] = 0x1234;
}

static void frame_can_be_edited(void)
{
	struct sigaction action = { .sa_sigaction = edit_frame, .sa_flags = SA_SIGINFO };
	unsigned out[4], in[4] = { 0x0f0f0f0f, 1, 2, 3 };
	long r12, result;

	sigaction(SIGUSR1, &action, NULL);
	pid_t own = getpid();
	__asm__ volatile("movdqu %3, %%xmm3\n\txor %%r12d, %%r12d\n\tsyscall\n\t"
			 "movdqu %%xmm3, %1\n\tmov %%r12, %2"
			 : "=a"(result), "=m"(out), "=r"(r12)
			 : "m"(in), "a"(SYS_kill), "D"(own), "S"(SIGUSR1)
			 : "rcx", "r11", "r12", "xmm3", "memory");
	say("xmm3 %x %x, r12 %lx", out[0], out[1], r12);
}

static void calls_keep_registers(void)
{
	unsigned long in[6] = { 11, 12, 13, 14, 15, 16 }, out[6], flags, result;

	__asm__ volatile("mov 0(%3), %%rbx\n\tmov 8(%3), %%r12\n\tmov 16(%3), %%r13\n\t"
			 "mov 24(%3), %%r14\n\tmov 32(%3), %%r15\n\tmov 40(%3), %%r9\n\t"
			 "std\n\tsyscall\n\tpushf\n\tcld\n\tpop %1\n\t"
			 "mov %%rbx, 0(%2)\n\tmov %%r12, 8(%2)\n\tmov %%r13, 16(%2)\n\t"
			 "mov %%r14, 24(%2)\n\tmov %%r15, 32(%2)\n\tmov %%r9, 40(%2)"
			 : "=a"(result), "=&r"(flags)
			 : "r"(out), "r"(in), "a"(SYS_getppid)
			 : "rbx", "rcx", "r9", "r11", "r12", "r13", "r14", "r15", "memory");
	say("%lu %lu %lu %lu %lu %lu, direction flag %lu", out[0], out[1], out[2], out[3], out[4],
	    out[5], flags >> 10 & 1);
	unsigned char red[128];
	__asm__ volatile("movb $0x5a, -100(%%rsp)\n\tsyscall\n\tmovb -100(%%rsp), %%al"
			 : "=a"(result) : "a"(SYS_getppid) : "rcx", "r11", "memory");
	(void)red;
	say("red zone %lx", result & 0xff);
}

const struct fact floats[] = {
	{ "signal_keeps_vectors", signal_keeps_vectors },
	{ "switches_keep_vectors", switches_keep_vectors },
	{ "fork_keeps_vectors", fork_keeps_vectors },
	{ "faults_keep_vectors", faults_keep_vectors },
	{ "frame_can_be_edited", frame_can_be_edited },
	{ "calls_keep_registers", calls_keep_registers },
	{ 0 },
};
