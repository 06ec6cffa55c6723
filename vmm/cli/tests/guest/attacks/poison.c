/* What a program leaves to those that come after it in its host process. */
#include "attacks.h"

#include <asm/prctl.h>

/* Of arch/um/include/shared/skas/stub-abi.h in the patched kernel */
#define STOP_NR 0x3ffffffeUL
#define ROUNDS 6
#define FOLLOWERS 8
#define FOLLOWER 7
/* What a trap of a page fault says in a signal frame, see <asm/traps.h> */
#define PAGE_FAULT 14

struct poison {
	/* The stub's instructions: that of a stop, that of rt_sigreturn. */
	unsigned long stop, sigreturn;
	/* The frame that this thread stops with, and the stack that it goes on with */
	ucontext_t *frame;
	unsigned long stack;
	int keeps_signals;
};

/* Stops, as if a fault had been met that is the end of this process. */
static void stop(const struct poison *p)
{
	unsigned long fs = 0;
	register unsigned long r10 __asm__("r10");
	register unsigned long r8 __asm__("r8") = 0;

	p->frame->uc_mcontext.gregs[REG_TRAPNO] = PAGE_FAULT;
	p->frame->uc_mcontext.gregs[REG_CR2] = 8;
	p->frame->uc_mcontext.gregs[REG_ERR] = 4;
	syscall(SYS_arch_prctl, ARCH_GET_FS, &fs);
	r10 = fs;
	__asm__ volatile("mov %[stack], %%rsp\n\tjmp *%[site]"
			 :
			 : "a"(STOP_NR), "D"((long)SIGSEGV), "S"((char *)p->frame - 256),
			   "d"(p->frame), "r"(r10), "r"(r8), [site] "b"(p->stop),
			   [stack] "c"(p->stack)
			 : "memory");
	__builtin_unreachable();
}

static const struct poison *current;
static char stop_stack[64 << 10] __attribute__((aligned(64)));

static void stop_now(void)
{
	stop(current);
}

/* Goes on with all signals blocked, and a signal stack that is all memory. */
static void lose_signals(const struct poison *p)
{
	static struct {
		ucontext_t context;
		siginfo_t info;
	} __attribute__((aligned(64))) frame;
	greg_t *regs = frame.context.uc_mcontext.gregs;

	current = p;
	memset(&frame.context.uc_sigmask, 0xff, 8);
	frame.context.uc_stack.ss_sp = (void *)PAGE;
	frame.context.uc_stack.ss_size = 1UL << 46;
	regs[REG_RIP] = (greg_t)stop_now;
	regs[REG_RSP] = (greg_t)(stop_stack + sizeof(stop_stack) - 64 - 8);
	regs[REG_EFL] = 0x202;
	regs[REG_CSGSFS] = 0x33 | (greg_t)0x2b << 48;
	__asm__ volatile("mov %[frame], %%rsp\n\tmov $15, %%eax\n\tjmp *%[site]"
			 :
			 : [frame] "c"(&frame), [site] "b"(p->sigreturn)
			 : "memory");
}

/* The frame of the last signal is still on the page of the thread's signal stack. */
static ucontext_t *find_frame(void)
{
	for (int p = 0; p < page_count; p++) {
		if (!is_writable(pages[p]))
			continue;
		for (unsigned long i = 256; i < PAGE - sizeof(ucontext_t); i += 8) {
			ucontext_t *frame = (void *)(pages[p] + i);

			if ((frame->uc_flags & ~7UL) == 0 && frame->uc_flags && !frame->uc_link &&
			    frame->uc_stack.ss_size == 2 * PAGE)
				return frame;
		}
	}
	return NULL;
}

static int be_followed(void)
{
	int status, failed = 0;

	for (int i = 0; i < FOLLOWERS; i++) {
		if (fork() == 0)
			_exit(getppid() > 0 && is_readable((unsigned long)stop_stack) ? FOLLOWER : 1);
		wait(&status);
		failed += !WIFEXITED(status) || WEXITSTATUS(status) != FOLLOWER;
	}
	return failed;
}

/* A child dies of a stop that it has forged; others are born where it was. */
int poison(void)
{
	/* A page that is the same in each, the program's own code, the gates' pointers */
	unsigned long stacks[] = { 8, (unsigned long)&sites, (unsigned long)poison, 0x5f060000 };
	int failed = 0, status, tried = 0;

	for (int s = 0; s < site_count; s++)
		for (int round = 0; round < ROUNDS; round++) {
			if (fork() == 0) {
				struct poison p = {
					.stop = sites[s],
					.stack = stacks[round % 4],
					.keeps_signals = round < 4,
				};

				is_readable(8);
				p.frame = find_frame();
				for (int i = 1; i < 32; i++)
					signal(i, SIG_DFL);
				alarm(2);
				if (!p.frame)
					_exit(2);
				/* Any other may be the one of rt_sigreturn. */
				for (int other = 0; !p.keeps_signals && other < site_count; other++) {
					p.sigreturn = sites[other];
					if (fork() == 0)
						lose_signals(&p);
					wait(NULL);
				}
				stop(&p);
			}
			wait(&status);
			if (WIFEXITED(status) && WEXITSTATUS(status) == 2) {
				snprintf(found, sizeof(found), "no signal frame was found");
				return 1;
			}
			tried += WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV;
			failed += be_followed();
		}
	snprintf(found, sizeof(found), "%d died, %d followers failed", tried, failed);
	return failed != 0 || tried == 0;
}
