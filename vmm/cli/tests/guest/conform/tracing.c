/* ptrace and seccomp: a program that watches or filters another. */
#include "conform.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/user.h>

static volatile long watched = 41;

static void traced_calls(void)
{
	ptrace(PTRACE_TRACEME, 0, 0, 0);
	raise(SIGSTOP);
	syscall(SYS_getppid);
	syscall(SYS_getuid);
	_exit(watched == 42 ? 5 : 6);
}

static void calls(void)
{
	struct user_regs_struct regs;
	pid_t child = child_of(traced_calls);
	int status, stops = 0;

	waitpid(child, &status, 0);
	say("%s", status_text(status));
	say_call("options", ptrace(PTRACE_SETOPTIONS, child, 0, PTRACE_O_TRACESYSGOOD));
	say("peek %ld", ptrace(PTRACE_PEEKDATA, child, &watched, 0));
	say_call("poke", ptrace(PTRACE_POKEDATA, child, &watched, 42));
	while (ptrace(PTRACE_SYSCALL, child, 0, 0) == 0 && waitpid(child, &status, 0) == child &&
	       WIFSTOPPED(status)) {
		ptrace(PTRACE_GETREGS, child, 0, &regs);
		if (regs.orig_rax != SYS_getppid && regs.orig_rax != SYS_getuid)
			continue;
		if (stops++ % 2 == 0) {
			say("enter %llu, %s, rax %s", regs.orig_rax, status_text(status),
			    (long)regs.rax == -ENOSYS ? "ENOSYS" : "other");
			if (regs.orig_rax == SYS_getppid) {
				regs.orig_rax = -1;
				ptrace(PTRACE_SETREGS, child, 0, &regs);
				ptrace(PTRACE_SYSCALL, child, 0, 0);
				waitpid(child, &status, 0);
				ptrace(PTRACE_GETREGS, child, 0, &regs);
				say("skipped: rax %s", (long)regs.rax == -ENOSYS ? "ENOSYS" : "other");
				stops++;
			}
		}
	}
	say("%s after %d stops", status_text(status), stops);
}

static void spins(void)
{
	for (;;)
		watched++;
}

static void attach(void)
{
	struct user_regs_struct before, after;
	pid_t child = child_of(spins);
	int status, steps = 0;

	usleep(20000);
	say_call("attach", ptrace(PTRACE_ATTACH, child, 0, 0));
	waitpid(child, &status, 0);
	say("%s", status_text(status));
	ptrace(PTRACE_GETREGS, child, 0, &before);
	for (int i = 0; i < 20; i++) {
		ptrace(PTRACE_SINGLESTEP, child, 0, 0);
		waitpid(child, &status, 0);
		ptrace(PTRACE_GETREGS, child, 0, &after);
		steps += WIFSTOPPED(status) && WSTOPSIG(status) == SIGTRAP;
	}
	say("%d steps", steps);
	struct user_fpregs_struct floats;
	say_call("floats", ptrace(PTRACE_GETFPREGS, child, 0, &floats));
	say_call("detach", ptrace(PTRACE_DETACH, child, 0, 0));
	kill(child, SIGKILL);
	say_end(child);
}

static void seize(void)
{
	pid_t child = child_of(spins);
	siginfo_t info;
	int status;

	say_call("seize", ptrace(PTRACE_SEIZE, child, 0, PTRACE_O_EXITKILL | PTRACE_O_TRACEEXIT));
	say_call("interrupt", ptrace(PTRACE_INTERRUPT, child, 0, 0));
	waitpid(child, &status, 0);
	say("%s", status_text(status));
	ptrace(PTRACE_CONT, child, 0, 0);
	kill(child, SIGUSR1);
	waitpid(child, &status, 0);
	ptrace(PTRACE_GETSIGINFO, child, 0, &info);
	say("%s, code %d", status_text(status), info.si_code);
	ptrace(PTRACE_CONT, child, 0, SIGUSR1);
	waitpid(child, &status, 0);
	say("%s", status_text(status));
	ptrace(PTRACE_CONT, child, 0, 0);
	say_end(child);
}

static void breakpoint_here(void)
{
	ptrace(PTRACE_TRACEME, 0, 0, 0);
	raise(SIGSTOP);
	watched = 0;
	__asm__ volatile("int3");
	_exit(watched == 9);
}

static void breakpoints(void)
{
	pid_t child = child_of(breakpoint_here);
	int status;
	unsigned long offset = offsetof(struct user, u_debugreg);

	waitpid(child, &status, 0);
	say_call("debug address", ptrace(PTRACE_POKEUSER, child, offset, &watched));
	say_call("debug control", ptrace(PTRACE_POKEUSER, child, offset + 7 * 8, 0xd0001));
	ptrace(PTRACE_CONT, child, 0, 0);
	waitpid(child, &status, 0);
	say("write to what is watched: %s", status_text(status));
	say("%ld", ptrace(PTRACE_PEEKDATA, child, &watched, 0));
	kill(child, SIGKILL);
	waitpid(child, &status, 0);
	child = child_of(breakpoint_here);
	waitpid(child, &status, 0);
	ptrace(PTRACE_CONT, child, 0, 0);
	waitpid(child, &status, 0);
	say("int3: %s", status_text(status));
	ptrace(PTRACE_POKEDATA, child, &watched, 9);
	ptrace(PTRACE_CONT, child, 0, 0);
	say_end(child);
}

static void traced_exec(void)
{
	ptrace(PTRACE_TRACEME, 0, 0, 0);
	raise(SIGSTOP);
	execl("/bin/true", "true", NULL);
}

static void exec_stops(void)
{
	pid_t child = child_of(traced_exec);
	int status;

	waitpid(child, &status, 0);
	ptrace(PTRACE_SETOPTIONS, child, 0, PTRACE_O_TRACEEXEC);
	ptrace(PTRACE_CONT, child, 0, 0);
	waitpid(child, &status, 0);
	say("%s", status_text(status));
	ptrace(PTRACE_CONT, child, 0, 0);
	say_end(child);
}

static void filter(unsigned action)
{
	struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_getuid, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, action),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = { sizeof(code) / sizeof(*code), code };

	prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
	say_call("filter", prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program));
}

static void on_sys(int signal, siginfo_t *info, void *context)
{
	ucontext_t *at = context;

	say("signal %d code %d call %d arch %x", signal, info->si_code, info->si_syscall,
	    info->si_arch);
	at->uc_mcontext.gregs[REG_RAX] = 123;
}

static void trapped(void)
{
	struct sigaction action = { .sa_sigaction = on_sys, .sa_flags = SA_SIGINFO };

	sigaction(SIGSYS, &action, NULL);
	filter(SECCOMP_RET_TRAP);
	say("%ld", syscall(SYS_getuid));
}

static void refused(void)
{
	filter(SECCOMP_RET_ERRNO | EXDEV);
	say_call("getuid", syscall(SYS_getuid));
}

static void killed(void)
{
	filter(SECCOMP_RET_KILL_PROCESS);
	syscall(SYS_getuid);
}

static void filters(void)
{
	say_end(child_of(trapped));
	say_end(child_of(refused));
	say_end(child_of(killed));
}

const struct fact tracing[] = {
	{ "calls", calls },	      { "attach", attach },	    { "seize", seize },
	{ "breakpoints", breakpoints }, { "exec_stops", exec_stops }, { "filters", filters },
	{ 0 },
};
