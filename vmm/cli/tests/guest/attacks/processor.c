/* Keeping the processor. A case that succeeds says nothing more: the cell hangs. */
#include "attacks.h"

static volatile long *spins;
static long most_spins;

static void spin(void)
{
	for (;;)
		++*spins;
}

/*
 * Lets `attack` try to spin for good in a child, and sees whether this process is
 * still scheduled. Where it is not, nobody prints anything: the cell hangs.
 */
static void still_scheduled(void (*attack)(void *), void *argument)
{
	pid_t child;

	spins = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	child = fork();
	if (child == 0) {
		attack(argument);
		_exit(0);
	}
	usleep(300000);
	kill(child, SIGKILL);
	waitpid(child, NULL, 0);
	if (*spins > most_spins)
		most_spins = *spins;
	snprintf(found, sizeof(found), "at most %ld spins at %d places", most_spins, site_count);
}

static void block_and_spin(void *unused)
{
	sigset_t all;

	(void)unused;
	sigfillset(&all);
	sigprocmask(SIG_SETMASK, &all, NULL);
	spin();
}

int keep_cpu_mask(void)
{
	still_scheduled(block_and_spin, NULL);
	return 0;
}

/* A frame as rt_sigreturn reads it: no signal may come, and on with spin(). */
static struct {
	ucontext_t context;
	siginfo_t info;
} __attribute__((aligned(64))) frame;
static char spin_stack[64 << 10] __attribute__((aligned(64)));

static void forge_frame(void)
{
	greg_t *regs = frame.context.uc_mcontext.gregs;

	memset(&frame, 0, sizeof(frame));
	memset(&frame.context.uc_sigmask, 0xff, 8);
	regs[REG_RIP] = (greg_t)spin;
	regs[REG_RSP] = (greg_t)(spin_stack + sizeof(spin_stack) - 64 - 8);
	regs[REG_EFL] = 0x202;
	/* cs, gs, fs, ss as the host's user code has them. */
	regs[REG_CSGSFS] = 0x33 | (greg_t)0x2b << 48;
}

static void sigreturn_and_spin(void *site)
{
	forge_frame();
	__asm__ volatile("mov %[frame], %%rsp\n\tmov $15, %%eax\n\tjmp *%[site]"
			 :
			 : [frame] "c"(&frame), [site] "b"(site)
			 : "memory");
}

int keep_cpu_sigreturn(void)
{
	for (int s = 0; s < site_count; s++)
		still_scheduled(sigreturn_and_spin, (void *)sites[s]);
	return 0;
}

static void sigprocmask_and_spin(void *site)
{
	static unsigned long all = -1UL;

	for (int i = 0; i < JUMP_STACK; i++)
		jump_stack[i] = (unsigned long)spin;
	register unsigned long r10 __asm__("r10") = 8;
	__asm__ volatile("mov %[stack], %%rsp\n\tjmp *%[site]"
			 :
			 : "a"(SYS_rt_sigprocmask), "D"(SIG_SETMASK), "S"(&all), "d"(0), "r"(r10),
			   [site] "r"(site), [stack] "r"(&jump_stack[JUMP_STACK / 2])
			 : "memory");
}

int keep_cpu_sigprocmask(void)
{
	for (int s = 0; s < site_count; s++)
		still_scheduled(sigprocmask_and_spin, (void *)sites[s]);
	return 0;
}

/* A stack pointer at which the host cannot put a frame, and no end. */
static void bad_stack_and_spin(void *unused)
{
	(void)unused;
	__asm__ volatile("mov $8, %%rsp\n1:\tlock incq (%0)\n\tjmp 1b" : : "r"(spins) : "memory");
}

int keep_cpu_bad_stack(void)
{
	still_scheduled(bad_stack_and_spin, NULL);
	return 0;
}
