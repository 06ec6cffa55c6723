/* Signals: what the handler is told, and what the program keeps. */
#include "conform.h"

static volatile int last, code, count, on_stack;
static char *other_stack;
#define OTHER_BYTES (64UL << 10)

static void on_signal(int signal, siginfo_t *info, void *context)
{
	volatile char here;

	(void)context;
	last = signal;
	code = info->si_code;
	on_stack = &here >= other_stack && &here < other_stack + OTHER_BYTES;
	count++;
}

static void install(int signal, int flags)
{
	struct sigaction action = { .sa_sigaction = on_signal, .sa_flags = SA_SIGINFO | flags };

	sigaction(signal, &action, NULL);
}

static sigjmp_buf back;
static void *volatile address;

static void on_trap(int signal, siginfo_t *info, void *context)
{
	ucontext_t *at = context;

	last = signal;
	code = info->si_code;
	address = info->si_addr;
	(void)at;
	siglongjmp(back, 1);
}

#define TRAP(what, ...)                                                                            \
	do {                                                                                       \
		struct sigaction action = { .sa_sigaction = on_trap, .sa_flags = SA_SIGINFO };     \
		for (int s = SIGILL; s <= SIGSEGV; s++)                                            \
			if (s != SIGKILL)                                                          \
				sigaction(s, &action, NULL);                                       \
		if (!sigsetjmp(back, 1)) {                                                         \
			__VA_ARGS__;                                                               \
			say(what ": nothing");                                                     \
		} else {                                                                           \
			say(what ": SIG%s code %d", sigabbrev_np(last), code);                     \
		}                                                                                  \
	} while (0)

static void traps(void)
{
	volatile int zero = 0;

	TRAP("null", *(volatile char *)0 = 1);
	say("address %s", address == NULL ? "0" : "other");
	TRAP("not canonical", *(volatile char *)0x8000000000000000UL = 1);
	say("address %s", address == NULL ? "0" : "other");
	TRAP("kernel's half", *(volatile char *)0xffff800000000000UL = 1);
	TRAP("division", zero = 1 / zero);
	TRAP("ud2", __asm__ volatile("ud2"));
	TRAP("hlt", __asm__ volatile("hlt"));
	TRAP("int3", __asm__ volatile("int3"));
	TRAP("int1", __asm__ volatile(".byte 0xf1"));
	TRAP("int 0x42", __asm__ volatile("int $0x42"));
	TRAP("single step", __asm__ volatile("pushf\n\torl $0x100, (%rsp)\n\tpopf\n\tnop"));
	TRAP("port", __asm__ volatile("outb %al, $0x80"));
	TRAP("segment", __asm__ volatile("mov %0, %%fs" : : "r"(0x1234)));
	TRAP("jump to a hole", ((void (*)(void))0x10)());
}

static void stacks(void)
{
	stack_t stack = { .ss_size = OTHER_BYTES }, old;

	stack.ss_sp = other_stack = malloc(OTHER_BYTES);
	say_call("sigaltstack", sigaltstack(&stack, NULL));
	install(SIGUSR1, SA_ONSTACK);
	raise(SIGUSR1);
	say("on the other stack: %d", on_stack);
	install(SIGUSR1, 0);
	raise(SIGUSR1);
	say("without the flag: %d", on_stack);
	sigaltstack(NULL, &old);
	say("kept: %d %d", old.ss_sp == other_stack, old.ss_flags);
	stack.ss_size = 100;
	say_call("too small", sigaltstack(&stack, NULL));
}

static void overflow(void)
{
	stack_t stack = { .ss_size = OTHER_BYTES };

	stack.ss_sp = other_stack = malloc(OTHER_BYTES);
	sigaltstack(&stack, NULL);
	struct sigaction action = { .sa_sigaction = on_trap, .sa_flags = SA_SIGINFO | SA_ONSTACK };
	sigaction(SIGSEGV, &action, NULL);
	if (!sigsetjmp(back, 1))
		__asm__ volatile("1:\tpush %rax\n\tjmp 1b");
	say("a full stack: SIG%s code %d", sigabbrev_np(last), code);
}

/* Until it is killed: a signal that comes before its wait is not the last one. */
static void interrupt_often(void)
{
	for (;;) {
		usleep(50000);
		kill(getppid(), SIGUSR1);
	}
}

static void end(pid_t child)
{
	kill(child, SIGKILL);
	waitpid(child, NULL, 0);
}

static void restarts(void)
{
	int ends[2];
	char byte;
	pid_t child;

	pipe(ends);
	install(SIGUSR1, 0);
	child = child_of(interrupt_often);
	say_call("read", read(ends[0], &byte, 1));
	say_call("pause", pause());
	say_call("sleep", nanosleep(&(struct timespec){ 60, 0 }, NULL));
	end(child);
	install(SIGUSR1, SA_RESTART);
	count = 0;
	child = fork();
	if (child == 0) {
		for (int i = 0; i < 3; i++) {
			usleep(50000);
			kill(getppid(), SIGUSR1);
		}
		usleep(50000);
		write(ends[1], "x", 1);
		_exit(0);
	}
	say_call("restarted read", read(ends[0], &byte, 1));
	say("after signals %d", count > 0);
	waitpid(child, NULL, 0);
	child = child_of(interrupt_often);
	say_call("pause is not restarted", pause());
	say_call("nor is sleep", nanosleep(&(struct timespec){ 60, 0 }, NULL));
	end(child);
}

static void masks(void)
{
	sigset_t set, pending, old;
	union sigval value = { .sival_int = 77 };
	siginfo_t info;

	sigemptyset(&set);
	sigaddset(&set, SIGRTMIN);
	sigaddset(&set, SIGRTMIN + 1);
	sigaddset(&set, SIGUSR1);
	sigprocmask(SIG_BLOCK, &set, &old);
	sigqueue(getpid(), SIGRTMIN + 1, value);
	value.sival_int = 78;
	sigqueue(getpid(), SIGRTMIN, value);
	sigqueue(getpid(), SIGRTMIN, value);
	raise(SIGUSR1);
	raise(SIGUSR1);
	sigpending(&pending);
	say("pending %d %d", sigismember(&pending, SIGUSR1), sigismember(&pending, SIGUSR2));
	for (int i = 0; i < 5; i++) {
		int signal = sigtimedwait(&set, &info, &(struct timespec){ 0, 0 });

		if (signal < 0)
			say_call("sigtimedwait", -1);
		else
			say("signal %d value %d code %d", signal, info.si_value.sival_int,
			    info.si_code);
	}
	install(SIGUSR1, SA_RESETHAND | SA_NODEFER);
	raise(SIGUSR1);
	sigsuspend(&old);
	say("suspended: %s", strerrorname_np(errno));
	struct sigaction now;
	sigaction(SIGUSR1, NULL, &now);
	say("reset %d", now.sa_handler == SIG_DFL);
	say_call("no handler for SIGKILL", sigaction(SIGKILL, &now, NULL));
}

static void deaths(void)
{
	static const int fatal[] = { SIGHUP, SIGABRT, SIGSEGV, SIGPIPE, SIGSYS, SIGXCPU };

	for (size_t i = 0; i < sizeof(fatal) / sizeof(*fatal); i++) {
		pid_t child = fork();

		if (child == 0) {
			/* A caller may have it ignored. */
			signal(fatal[i], SIG_DFL);
			raise(fatal[i]);
			_exit(0);
		}
		say_end(child);
	}
	pid_t child = fork();
	if (child == 0)
		for (;;)
			;
	kill(child, SIGSTOP);
	int status;
	waitpid(child, &status, WUNTRACED);
	say("%s", status_text(status));
	kill(child, SIGCONT);
	waitpid(child, &status, WCONTINUED);
	say("%s", status_text(status));
	kill(child, SIGKILL);
	say_end(child);
}

const struct fact signals[] = {
	{ "traps", traps },	  { "stacks", stacks }, { "overflow", overflow },
	{ "restarts", restarts }, { "masks", masks },	{ "deaths", deaths },
	{ 0 },
};
