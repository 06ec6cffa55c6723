/* Children that begin with what no address or register is. */
#include "ordinary.h"

/* Makes a child with the stack pointer @stack that touches no memory, and exits with 7. */
static long child_at(unsigned long stack)
{
	long made;

	__asm__ volatile("mov %1, %%rsi\n\t"
			 "mov %2, %%edi\n\t"
			 "xor %%edx, %%edx\n\t"
			 "xor %%r10d, %%r10d\n\t"
			 "xor %%r8d, %%r8d\n\t"
			 "mov %3, %%eax\n\t"
			 "syscall\n\t"
			 "test %%rax, %%rax\n\t"
			 "jnz 1f\n\t"
			 "mov $7, %%edi\n\t"
			 "mov %4, %%eax\n\t"
			 "syscall\n"
			 "1:"
			 : "=a"(made)
			 : "r"(stack), "i"(SIGCHLD), "i"(SYS_clone), "i"(SYS_exit_group)
			 : "rdi", "rsi", "rdx", "r8", "r10", "rcx", "r11", "memory");
	return made;
}

int odd_stacks(void)
{
	static char stack[16 * PAGE] __attribute__((aligned(4096)));
	const unsigned long bits[] = { 1UL << 47, 1UL << 48, 1UL << 49, 3UL << 52, 1UL << 55,
				       1UL << 56, 1UL << 63, 0xffffffff00000000UL };
	int broken = 0;

	/* Its page is there. */
	stack[100] = 1;
	for (unsigned i = 0; i < sizeof(bits) / sizeof(*bits); i++) {
		long pid = child_at(((unsigned long)stack + PAGE) | bits[i]);
		int status = 0;

		if (pid > 0 && waitpid(pid, &status, 0) == pid && status == 7 << 8)
			continue;
		broken = 1;
		snprintf(found, sizeof(found), "bits %lx: status %x", bits[i], status);
	}
	return broken;
}

#define AREA_BYTES 1200

int odd_registers(void)
{
	/* Of struct user: registers, and those of the debugger. */
	const long regs_end = 27 * 8, debug_end = 848 + 8 * 8;
	pid_t pid = fork();
	int broken = 0;

	if (pid == 0) {
		ptrace(PTRACE_TRACEME, 0, 0, 0);
		raise(SIGSTOP);
		_exit(0);
	}
	waitpid(pid, NULL, 0);
	for (long at = 0; at < AREA_BYTES; at++) {
		int is_register = at % 8 == 0 && at < regs_end;
		long data = 0, got = syscall(SYS_ptrace, PTRACE_PEEKUSER, pid, at, &data);

		if (at % 8 != 0) {
			syscall(SYS_ptrace, PTRACE_POKEUSER, pid, at, 0);
			broken |= got == 0;
		}
		if (at >= debug_end && got == 0 && data != 0)
			broken = 1;
		broken |= is_register && got != 0;
	}
	kill(pid, SIGKILL);
	waitpid(pid, NULL, 0);
	return broken;
}
