/*
 * What a hostile guest program can try against the stub, the host process that
 * runs its code: `attacks list` names the cases, `attacks CASE` tries one and
 * prints `CASE held REASON` or `CASE broken REASON`. `attacks CASE own` tries it with a
 * host call of its own instead, on the host: that the attack works at all.
 *
 * The stub's own pages are mapped where the guest's address space ends; they are
 * found by probing, not by a layout that another kernel may not have. A host call
 * shows by its effect: a page that appears where the guest mapped none.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#define PAGE 4096UL
/* The end of what the host gives a process, and how far below it is searched. */
#define TOP 0x7ffffffff000UL
#define SEARCHED (2048 * PAGE)
/* Where an attack wants a page of the host; below 4 GB for 32-bit calls. */
#define TARGET 0x20000000UL
#define SITES_MAX 64
#define PAGES_MAX 256
#define FDS_MAX 12
#define SECONDS_MAX 3
/* Each after 2 ms: an attack that ends is over sooner, one that blocks is left. */
#define LOOKS 50

/* Where a probe goes on after a fault; a fault elsewhere ends the attack. */
static __thread sigjmp_buf back;
static __thread volatile int probing;

static int is_readable(unsigned long address);

static void on_fault(int signal)
{
	(void)signal;
	if (probing)
		siglongjmp(back, 1);
	_exit(is_readable(TARGET));
}

static void catch_faults(void)
{
	struct sigaction action = { .sa_handler = on_fault, .sa_flags = SA_NODEFER | SA_ONSTACK };
	stack_t other = { .ss_sp = malloc(64 << 10), .ss_size = 64 << 10 };

	sigaltstack(&other, NULL);
	for (int s = 1; s < 32; s++)
		if (s != SIGKILL && s != SIGSTOP && s != SIGCHLD && s != SIGALRM)
			sigaction(s, &action, NULL);
}

static int is_readable(unsigned long address)
{
	int readable = 0;

	probing = 1;
	if (!sigsetjmp(back, 1)) {
		(void)*(volatile char *)address;
		readable = 1;
	}
	probing = 0;
	return readable;
}

static int is_writable(unsigned long address)
{
	volatile char *at = (volatile char *)address;
	int writable = 0;

	probing = 1;
	if (!sigsetjmp(back, 1)) {
		*at = *at;
		writable = 1;
	}
	probing = 0;
	return writable;
}

/* Foreign pages: those of the stub. */
static unsigned long pages[PAGES_MAX], sites[SITES_MAX];
static int page_count, site_count;

static void explore(void)
{
	catch_faults();
	for (unsigned long at = TOP - PAGE; at >= TOP - SEARCHED; at -= PAGE)
		if (page_count < PAGES_MAX && is_readable(at))
			pages[page_count++] = at;
	for (int p = 0; p < page_count; p++)
		for (unsigned long i = 0; i < PAGE - 1; i++) {
			const unsigned char *at = (void *)(pages[p] + i);

			if (at[0] == 0x0f && at[1] == 0x05 && site_count < SITES_MAX)
				sites[site_count++] = pages[p] + i;
		}
}

struct call {
	unsigned long site, nr, args[6];
};

/* The code behind a site returns to where this stack says, or does not return. */
static unsigned long jump_stack[1024] __attribute__((aligned(64)));

static void landed(void)
{
	for (;;)
		pause();
}

/* Jumps to a site with the registers of a call. It never comes back. */
static void *jump(void *argument)
{
	struct call *c = argument;

	catch_faults();
	for (int i = 0; i < 1024; i++)
		jump_stack[i] = (unsigned long)landed;
	register unsigned long r10 __asm__("r10") = c->args[3];
	register unsigned long r8 __asm__("r8") = c->args[4];
	register unsigned long r9 __asm__("r9") = c->args[5];
	register unsigned long site __asm__("rbx") = c->site;
	__asm__ volatile("mov %[stack], %%rsp\n\tjmp *%%rbx"
			 :
			 : "a"(c->nr), "D"(c->args[0]), "S"(c->args[1]), "d"(c->args[2]), "r"(r10),
			   "r"(r8), "r"(r9), "r"(site), [stack] "r"(&jump_stack[512])
			 : "memory");
	__builtin_unreachable();
}

/* What a child made of the attack: 0 held, 1 broken; a death is holding. */
static int in_child(int (*attack)(void *), void *argument)
{
	int status;
	pid_t child = fork();

	if (child == 0) {
		for (int s = 1; s < 32; s++)
			signal(s, SIG_DFL);
		alarm(SECONDS_MAX);
		_exit(attack(argument));
	}
	waitpid(child, &status, 0);
	return WIFEXITED(status) && WEXITSTATUS(status) == 1;
}

/* Jumps in a thread; another looks whether the page came to be. */
static int jump_and_look(void *call)
{
	pthread_t thread;

	catch_faults();
	pthread_create(&thread, NULL, jump, call);
	for (int i = 0; i < LOOKS; i++) {
		usleep(2000);
		if (is_readable(TARGET))
			return 1;
	}
	return 0;
}

static char found[160];

static int everywhere(struct call call)
{
	for (int s = 0; s < site_count; s++) {
		call.site = sites[s];
		if (in_child(jump_and_look, &call)) {
			snprintf(found, sizeof(found), "call %lu by the instruction at %lx", call.nr,
				 sites[s]);
			return 1;
		}
	}
	snprintf(found, sizeof(found), "%d foreign pages, %d call instructions", page_count,
		 site_count);
	return 0;
}

static int jump_mmap_anonymous(void)
{
	return everywhere((struct call){
		.nr = SYS_mmap,
		.args = { TARGET, PAGE, PROT_READ | PROT_WRITE,
			  MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1UL, 0 } });
}

static int jump_mmap_memory(void)
{
	for (unsigned long fd = 0; fd < FDS_MAX; fd++)
		if (everywhere((struct call){ .nr = SYS_mmap,
					      .args = { TARGET, PAGE, PROT_READ | PROT_WRITE,
							MAP_SHARED | MAP_FIXED, fd, 0 } }))
			return 1;
	return 0;
}

static int jump_mremap(void)
{
	unsigned long at = (unsigned long)mmap(NULL, PAGE, PROT_READ | PROT_WRITE,
					       MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);

	return everywhere((struct call){
		.nr = SYS_mremap,
		.args = { at, PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, TARGET, 0 } });
}

/* --- Other doors to the host's kernel --- */

static int mmap_by_int80(void *unused)
{
	long result = 192; /* mmap2 of the 32-bit table */

	(void)unused;
	catch_faults();
	__asm__ volatile("push %%rbp\n\txor %%ebp, %%ebp\n\tint $0x80\n\tpop %%rbp"
			 : "+a"(result)
			 : "b"(TARGET), "c"(PAGE), "d"(PROT_READ | PROT_WRITE),
			   "S"(MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED), "D"(-1)
			 : "memory", "r8", "r9", "r10", "r11");
	return is_readable(TARGET);
}

static void *sysenter(void *unused)
{
	(void)unused;
	catch_faults();
	/* The way back leads to an address of the 32-bit vDSO: nobody comes back. */
	__asm__ volatile("mov %%rsp, %%rbp\n\tsysenter"
			 :
			 : "a"(192L), "b"(TARGET), "c"(PAGE), "d"(PROT_READ | PROT_WRITE),
			   "S"(MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED), "D"(-1)
			 : "memory");
	return NULL;
}

static int mmap_by_sysenter(void *unused)
{
	pthread_t thread;

	(void)unused;
	catch_faults();
	pthread_create(&thread, NULL, sysenter, NULL);
	for (int i = 0; i < LOOKS; i++) {
		usleep(2000);
		if (is_readable(TARGET))
			return 1;
	}
	return 0;
}

/* mov $192,%eax; ...; int $0x80; ljmp back is not needed: another thread looks. */
static const unsigned char code32[] = {
	0xb8, 192, 0, 0, 0,		/* mov $192, %eax */
	0xbb, 0, 0, 0, 0x20,		/* mov $TARGET, %ebx */
	0xb9, 0, 0x10, 0, 0,		/* mov $4096, %ecx */
	0xba, 3, 0, 0, 0,		/* mov $PROT_READ|PROT_WRITE, %edx */
	0xbe, 0x32, 0, 0, 0,		/* mov $PRIVATE|FIXED|ANONYMOUS, %esi */
	0xbf, 0xff, 0xff, 0xff, 0xff,	/* mov $-1, %edi */
	0x31, 0xed,			/* xor %ebp, %ebp */
	0xcd, 0x80,			/* int $0x80 */
	0xeb, 0xfe,			/* jmp . */
};

static void *enter32(void *code)
{
	struct {
		unsigned int offset;
		unsigned short selector;
	} __attribute__((packed)) far = { (unsigned int)(unsigned long)code, 0x23 };

	catch_faults();
	__asm__ volatile("ljmp *%0" : : "m"(far) : "memory");
	return NULL;
}

static int mmap_by_32_bit_code(void *unused)
{
	pthread_t thread;
	void *code = mmap((void *)0x30000000, PAGE, PROT_READ | PROT_WRITE | PROT_EXEC,
			  MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);

	(void)unused;
	catch_faults();
	memcpy(code, code32, sizeof(code32));
	pthread_create(&thread, NULL, enter32, code);
	for (int i = 0; i < LOOKS; i++) {
		usleep(2000);
		if (is_readable(TARGET))
			return 1;
	}
	return 0;
}

/* The host's time by its vsyscall page: the answer must be the guest's or none. */
static int call_vsyscall(void *unused)
{
	struct timespec before;
	time_t (*host_time)(time_t *) = (void *)0xffffffffff600400;
	time_t t;

	(void)unused;
	catch_faults();
	clock_gettime(CLOCK_REALTIME, &before);
	t = host_time(NULL);
	return t != -1 && t != -ENOSYS && labs(t - before.tv_sec) > 1;
}

static int int80(void)
{
	return in_child(mmap_by_int80, NULL);
}

static int sysenter_(void)
{
	return in_child(mmap_by_sysenter, NULL);
}

static int far_jump_32(void)
{
	return in_child(mmap_by_32_bit_code, NULL);
}

static int vsyscall(void)
{
	return in_child(call_vsyscall, NULL);
}

/* --- The stub's own pages --- */

/* Guest calls that name the stub's pages must be refused. */
static int remap_stub(void)
{
	for (int p = 0; p < page_count; p++) {
		void *at = (void *)pages[p];

		snprintf(found, sizeof(found), "a guest call changed the page at %p", at);
		if (mprotect(at, PAGE, PROT_READ | PROT_WRITE | PROT_EXEC) == 0 ||
		    munmap(at, PAGE) == 0 ||
		    mmap(at, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED,
			 -1, 0) == at ||
		    madvise(at, PAGE, MADV_DONTNEED) == 0)
			return 1;
	}
	snprintf(found, sizeof(found), "%d foreign pages", page_count);
	return 0;
}

/* Code of the stub that the guest may write runs in whoever comes next. */
static int write_stub_code(void)
{
	for (int p = 0; p < page_count; p++) {
		int has_site = 0;

		for (int s = 0; s < site_count; s++)
			has_site |= (sites[s] & ~(PAGE - 1)) == pages[p];
		snprintf(found, sizeof(found), "the code page at %lx is writable", pages[p]);
		if (has_site && is_writable(pages[p]))
			return 1;
	}
	snprintf(found, sizeof(found), "%d foreign pages", page_count);
	return 0;
}

static unsigned long writable[PAGES_MAX];
static int writable_count;

static void *scribble(void *seed)
{
	unsigned long x = (unsigned long)seed;

	for (;;)
		for (int p = 0; p < writable_count; p++)
			for (unsigned long i = 0; i < PAGE; i += 8) {
				x = x * 6364136223846793005UL + 1442695040888963407UL;
				*(volatile unsigned long *)(writable[p] + i) =
					x & 1 ? x >> (x & 63) : x & 2 ? SYS_mmap : TARGET;
			}
	return NULL;
}

/* A thread fills the stub's data while the process maps, faults and calls. */
static int scribble_while_calling(void *seed)
{
	pthread_t thread;

	catch_faults();
	pthread_create(&thread, NULL, scribble, seed);
	for (int i = 0; i < 3000; i++) {
		char *at = mmap(NULL, 16 * PAGE, PROT_READ | PROT_WRITE,
				MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

		for (int j = 0; j < 16 && at != MAP_FAILED; j++)
			is_writable((unsigned long)at + j * PAGE);
		munmap(at, 16 * PAGE);
		if (is_readable(TARGET))
			return 1;
	}
	return 0;
}

/* What matters beside the page: that the guest kernel lives. The caller sees that. */
static int forge_data(void)
{
	for (int p = 0; p < page_count; p++)
		if (is_writable(pages[p]))
			writable[writable_count++] = pages[p];
	snprintf(found, sizeof(found), "%d writable foreign pages", writable_count);
	for (unsigned long seed = 1; seed <= 8; seed++)
		if (in_child(scribble_while_calling, (void *)seed))
			return 1;
	return 0;
}

/* --- Keeping the processor --- */

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
static int still_scheduled(void (*attack)(void *), void *argument)
{
	struct timespec start, now;
	pid_t child;

	spins = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	clock_gettime(CLOCK_MONOTONIC, &start);
	child = fork();
	if (child == 0) {
		attack(argument);
		_exit(0);
	}
	usleep(300000);
	kill(child, SIGKILL);
	waitpid(child, NULL, 0);
	clock_gettime(CLOCK_MONOTONIC, &now);
	if (*spins > most_spins)
		most_spins = *spins;
	snprintf(found, sizeof(found), "at most %ld spins at %d places", most_spins, site_count);
	return now.tv_sec - start.tv_sec > SECONDS_MAX;
}

static void block_and_spin(void *unused)
{
	sigset_t all;

	(void)unused;
	sigfillset(&all);
	sigprocmask(SIG_SETMASK, &all, NULL);
	spin();
}

static int keep_cpu_mask(void)
{
	return still_scheduled(block_and_spin, NULL);
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

static int keep_cpu_sigreturn(void)
{
	for (int s = 0; s < site_count; s++)
		if (still_scheduled(sigreturn_and_spin, (void *)sites[s]))
			return 1;
	return 0;
}

static void sigprocmask_and_spin(void *site)
{
	static unsigned long all = -1UL;

	for (int i = 0; i < 1024; i++)
		jump_stack[i] = (unsigned long)spin;
	register unsigned long r10 __asm__("r10") = 8;
	__asm__ volatile("mov %[stack], %%rsp\n\tjmp *%[site]"
			 :
			 : "a"(SYS_rt_sigprocmask), "D"(SIG_SETMASK), "S"(&all), "d"(0), "r"(r10),
			   [site] "r"(site), [stack] "r"(&jump_stack[512])
			 : "memory");
}

static int keep_cpu_sigprocmask(void)
{
	for (int s = 0; s < site_count; s++)
		if (still_scheduled(sigprocmask_and_spin, (void *)sites[s]))
			return 1;
	return 0;
}

/* A stack pointer at which the host cannot put a frame, and no end. */
static void bad_stack_and_spin(void *unused)
{
	(void)unused;
	__asm__ volatile("mov $8, %%rsp\n1:\tlock incq (%0)\n\tjmp 1b" : : "r"(spins) : "memory");
}

static int keep_cpu_bad_stack(void)
{
	return still_scheduled(bad_stack_and_spin, NULL);
}

static const struct {
	const char *name;
	int (*run)(void);
} cases[] = {
	{ "jump_mmap_anonymous", jump_mmap_anonymous },
	{ "jump_mmap_memory", jump_mmap_memory },
	{ "jump_mremap", jump_mremap },
	{ "int80", int80 },
	{ "sysenter", sysenter_ },
	{ "far_jump_32", far_jump_32 },
	{ "vsyscall", vsyscall },
	{ "remap_stub", remap_stub },
	{ "write_stub_code", write_stub_code },
	{ "forge_data", forge_data },
	{ "keep_cpu_mask", keep_cpu_mask },
	{ "keep_cpu_sigreturn", keep_cpu_sigreturn },
	{ "keep_cpu_sigprocmask", keep_cpu_sigprocmask },
	{ "keep_cpu_bad_stack", keep_cpu_bad_stack },
};
#define CASES (sizeof(cases) / sizeof(*cases))

/* Where the cases must succeed: not in the stub, and not filtered. */
__attribute__((naked)) static void own_site(void)
{
	__asm__ volatile("syscall\n\tud2");
}

int main(int argc, char **argv)
{
	int own = argc == 3 && !strcmp(argv[2], "own");

	for (unsigned c = 0; c < CASES; c++) {
		if (argc == 2 && !strcmp(argv[1], "list"))
			printf("%s\n", cases[c].name);
		if (argc < 2 || strcmp(argv[1], cases[c].name))
			continue;
		if (own)
			sites[site_count++] = (unsigned long)own_site;
		else
			explore();
		int broken = cases[c].run();
		printf("%s %s %s\n", cases[c].name, broken ? "broken" : "held", found);
	}
	return 0;
}
