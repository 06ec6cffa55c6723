/* Attacks by way of the guest kernel's own memory and code. */
#include "keys.h"

#define MEMORY 0x7f8000000000UL
#define MEMORY_SIZE (96UL << 20)
#define GATES 0x5f000000UL
#define GATES_END 0x60000000UL
#define CPUS_MAX 16

static int in_child(void (*attack)(void *), void *argument)
{
	int status;
	pid_t child = fork();

	if (child == 0) {
		catch_faults();
		alarm(5);
		redirect();
		attack(argument);
		landing();
	}
	waitpid(child, &status, 0);
	return WIFEXITED(status) && WEXITSTATUS(status) == 1;
}

int read_memory(void)
{
	for (unsigned long at = MEMORY; at < MEMORY + MEMORY_SIZE; at += 8 * PAGE)
		if (is_readable(at))
			return 1;
	return 0;
}

/* One page for each CPU is there to be written to. */
int write_kernel(void)
{
	for (unsigned long at = GATES; at < GATES_END; at += PAGE)
		if (is_writable(at))
			return 1;
	return writable_count > CPUS_MAX;
}

struct registers {
	unsigned long at, ax, cx, dx;
};

static void jump_there(void *argument)
{
	struct registers *r = argument;

	jump(r->at, r->ax, r->cx, r->dx);
}

int jump_pkru(void)
{
	static const unsigned int values[] = { PKRU_OPEN, PKRU_KERNEL };

	for (int s = 0; s < pkru_writers.count; s++)
		for (int v = 0; v < 2; v++)
			if (in_child(jump_there,
				     &(struct registers){ pkru_writers.at[s], values[v], 0, 0 }))
				return 1;
	return 0;
}

static void jump_there_32(void *argument)
{
	struct registers *r = argument;
	struct {
		unsigned int offset;
		unsigned short selector;
	} __attribute__((packed)) far = { (unsigned int)r->at, 0x23 };

	__asm__ volatile("ljmp *%[far]" : : [far] "m"(far), "a"(r->ax), "c"(0), "d"(0) : "memory");
}

int jump_pkru_32(void)
{
	for (int s = 0; s < pkru_writers.count; s++)
		for (unsigned int v = 0; v < 3; v++) {
			static const unsigned int values[] = { PKRU_OPEN, PKRU_KERNEL,
							       PKRU_KERNEL + 1 };

			if (in_child(jump_there_32,
				     &(struct registers){ pkru_writers.at[s], values[v], 0, 0 }))
				return 1;
		}
	return 0;
}

/* A state in which the keys are open */
static unsigned char state[8192] __attribute__((aligned(64)));

static void forge(unsigned int pkru)
{
	unsigned int eax, offset, ecx, edx;

	__cpuid_count(0xd, 9, eax, offset, ecx, edx);
	memset(state, 0, sizeof(state));
	*(uint64_t *)(state + 512) = 1 << 9;
	*(unsigned int *)(state + offset) = pkru;
}

int jump_restore(void)
{
	static const unsigned int values[] = { PKRU_OPEN, PKRU_KERNEL };

	for (int v = 0; v < 2; v++) {
		forge(values[v]);
		for (int s = 0; s < restorers.count; s++)
			if (in_child(jump_there, &(struct registers){ restorers.at[s], 1 << 9,
								      (unsigned long)state, 0 }))
				return 1;
	}
	return 0;
}

static void map_there(void *argument)
{
	static unsigned long stack[1024] __attribute__((aligned(64)));
	register unsigned long r10 __asm__("r10") = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
	register unsigned long r8 __asm__("r8") = -1;
	register unsigned long r9 __asm__("r9") = 0;

	for (int i = 0; i < 1024; i++)
		stack[i] = (unsigned long)landing;
	__asm__ volatile("mov %[stack], %%rsp\n\tjmp *%%rbx"
			 :
			 : "a"(SYS_mmap), "D"(TARGET), "S"(PAGE), "d"(PROT_READ | PROT_WRITE),
			   "r"(r10), "r"(r8), "r"(r9), "b"(*(unsigned long *)argument),
			   [stack] "r"(&stack[512])
			 : "memory");
}

/* The host's mmap(), by its own instructions; a fault behind it looks for the page. */
int jump_call(void)
{
	for (int s = 0; s < calls.count; s++)
		if (in_child(map_there, &calls.at[s]))
			return 1;
	return 0;
}

/* A frame like those of the host, on a stack of this program's */
static void signal_there(void *argument)
{
	(void)argument;
	jump(handler, 0, 0, 0);
}

int forge_signal(void)
{
	return in_child(signal_there, NULL);
}

static int was_forged;

static void on_usr1(int signal, siginfo_t *info, void *p)
{
	ucontext_t *context = p;
	unsigned char *fp = (void *)context->uc_mcontext.fpregs;
	unsigned int eax, offset, ecx, edx;

	(void)signal;
	(void)info;
	__cpuid_count(0xd, 9, eax, offset, ecx, edx);
	*(uint64_t *)(fp + 512) |= 1 << 9;
	*(unsigned int *)(fp + offset) = PKRU_OPEN;
	was_forged = 1;
}

/* Keys in the state that a signal's handler leaves behind */
int forge_state(void)
{
	struct sigaction action = { .sa_sigaction = on_usr1, .sa_flags = SA_SIGINFO };

	sigaction(SIGUSR1, &action, NULL);
	raise(SIGUSR1);
	return !was_forged || is_readable(secret);
}

/* A stack pointer in each page of the guest kernel's: signals come all the same. */
static void spin_with_stack(void *argument)
{
	__asm__ volatile("mov %0, %%rsp\n1:\tjmp 1b" : : "r"(argument) : "memory");
}

static volatile int beats;

static void on_beat(int signal)
{
	(void)signal;
	beats++;
}

int bad_stack(void)
{
	for (unsigned long at = writable[0] - 64 * PAGE; at < writable[0]; at += PAGE) {
		int status;
		pid_t child = fork();

		if (child == 0) {
			signal(SIGALRM, SIG_DFL);
			ualarm(20000, 0);
			spin_with_stack((void *)(at + 256));
		}
		waitpid(child, &status, 0);
		if (WIFEXITED(status))
			return 1;
	}
	signal(SIGALRM, on_beat);
	ualarm(1000, 1000);
	while (beats < 20)
		;
	return 0;
}

static volatile int is_over;

static void *write_always(void *unused)
{
	(void)unused;
	for (unsigned long n = 0; !is_over; n++)
		for (int p = 0; p < writable_count; p++)
			((volatile unsigned long *)writable[p])[5 + n % 3] = n;
	return NULL;
}

/* What the gate keeps in user memory changes while calls are made: they may fail. */
static void call_always(void *unused)
{
	pthread_t thread;

	(void)unused;
	pthread_create(&thread, NULL, write_always, NULL);
	for (int i = 0; i < 20000; i++)
		syscall(SYS_getppid);
	is_over = 1;
}

int race(void)
{
	return in_child(call_always, NULL);
}
