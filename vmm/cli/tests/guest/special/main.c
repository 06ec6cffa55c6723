/*
 * What a program can try against mappings that are the kernel's own: gates, the guest
 * kernel's image, the vDSO and its data. `special` tries each call that changes
 * mappings on each of them, in whole, in part and with what is beside it, and prints a
 * line for each that changed one, then how many were tried. Each try is a child's, which
 * must find all as before, go on by system calls, and have children that find it so too.
 *
 * `special stale` has mappings take the place of others in tables of page tables of their
 * own: what was there must not be seen.
 *
 * `special faults` touches addresses between them that nobody has: each must be the end
 * of a child, by SIGSEGV.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/shm.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#define PAGE 4096UL
#define SPECIALS_MAX 16
#define TEXT_MAX 2048
#define SECONDS_MAX 10
/* Somewhere to move things to, and to hold what is moved from */
#define ELSEWHERE 0x200000000UL
#ifndef MADV_GUARD_INSTALL
#define MADV_GUARD_INSTALL 102
#endif
#ifndef __NR_mseal
#define __NR_mseal 462
#endif

struct range {
	unsigned long start, len;
};

static struct {
	char name[64];
	struct range range;
} specials[SPECIALS_MAX];
static int special_count;

/* The lines of those mappings, and where they are if @fill. */
static void look(char *text, int fill)
{
	char line[512];
	FILE *maps = fopen("/proc/self/maps", "r");

	*text = 0;
	while (fgets(line, sizeof(line), maps)) {
		unsigned long start, end;
		char name[64] = "";

		sscanf(line, "%lx-%lx %*s %*s %*s %*s %63s", &start, &end, name);
		if (name[0] != '[' || !strcmp(name, "[heap]") || !strcmp(name, "[stack]") ||
		    !strncmp(name, "[anon", 5) || !strcmp(name, "[vsyscall]"))
			continue;
		strncat(text, line, TEXT_MAX - strlen(text) - 1);
		if (fill && special_count < SPECIALS_MAX) {
			memcpy(specials[special_count].name, name, sizeof(name));
			specials[special_count++].range = (struct range){ start, end - start };
		}
	}
	fclose(maps);
}

static void *at(struct range r)
{
	return (void *)r.start;
}

static void do_mmap(struct range r)
{
	mmap(at(r), r.len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
}

static void do_mmap_shared(struct range r)
{
	mmap(at(r), r.len, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
}

static void do_mmap_file(struct range r)
{
	mmap(at(r), r.len, PROT_READ | PROT_EXEC, MAP_PRIVATE | MAP_FIXED,
	     open("/proc/self/exe", O_RDONLY), 0);
}

static void do_mmap_none(struct range r)
{
	mmap(at(r), r.len, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
}

static void do_munmap(struct range r)
{
	munmap(at(r), r.len);
}

static void do_mremap_away(struct range r)
{
	mremap(at(r), r.len, r.len, MREMAP_MAYMOVE | MREMAP_FIXED, ELSEWHERE);
}

static void do_mremap_copy(struct range r)
{
	mremap(at(r), r.len, r.len, MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, ELSEWHERE);
	mremap(at(r), 0, r.len, MREMAP_MAYMOVE | MREMAP_FIXED, ELSEWHERE);
}

static void do_mremap_size(struct range r)
{
	mremap(at(r), r.len, PAGE, 0);
	mremap(at(r), r.len, r.len + PAGE, 0);
	mremap(at(r), r.len, r.len + PAGE, MREMAP_MAYMOVE);
}

static void do_mremap_onto(struct range r)
{
	mmap((void *)ELSEWHERE, r.len, PROT_READ | PROT_WRITE,
	     MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
	mremap((void *)ELSEWHERE, r.len, r.len, MREMAP_MAYMOVE | MREMAP_FIXED, r.start);
}

static void do_mprotect(struct range r)
{
	mprotect(at(r), r.len, PROT_READ | PROT_WRITE | PROT_EXEC);
	mprotect(at(r), r.len, PROT_NONE);
	mprotect(at(r), r.len, PROT_READ | PROT_WRITE | PROT_GROWSDOWN);
	pkey_mprotect(at(r), r.len, PROT_READ | PROT_WRITE, -1);
}

static void do_madvise(struct range r)
{
	for (int advice = 0; advice <= MADV_GUARD_INSTALL + 1; advice++)
		madvise(at(r), r.len, advice);
}

static void do_process_madvise(struct range r)
{
	struct iovec range = { at(r), r.len };
	int self = syscall(SYS_pidfd_open, getpid(), 0);

	for (int advice = 0; advice <= MADV_GUARD_INSTALL + 1; advice++)
		syscall(SYS_process_madvise, self, &range, 1, advice, 0);
}

static void do_remap_file_pages(struct range r)
{
	syscall(SYS_remap_file_pages, at(r), r.len, 0, 0, 0);
}

static void do_shmat(struct range r)
{
	int id = shmget(IPC_PRIVATE, r.len, IPC_CREAT | 0600);

	shmat(id, at(r), SHM_REMAP);
	shmat(id, at(r), 0);
	shmctl(id, IPC_RMID, NULL);
}

static void do_brk(struct range r)
{
	struct prctl_mm_map map = {
		.start_code = 0x400000, .end_code = 0x401000, .start_data = 0x402000,
		.end_data = 0x403000, .start_brk = r.start - PAGE, .brk = r.start - PAGE,
		.start_stack = (unsigned long)&map, .exe_fd = -1U,
	};

	syscall(SYS_brk, r.start + r.len);
	prctl(PR_SET_MM, PR_SET_MM_START_BRK, r.start - PAGE, 0, 0);
	prctl(PR_SET_MM, PR_SET_MM_BRK, r.start - PAGE, 0, 0);
	prctl(PR_SET_MM, PR_SET_MM_MAP, &map, sizeof(map), 0);
	syscall(SYS_brk, r.start + r.len);
	/* And back, from behind */
	map.start_brk = r.start - PAGE;
	map.brk = r.start + r.len + PAGE;
	prctl(PR_SET_MM, PR_SET_MM_MAP, &map, sizeof(map), 0);
	syscall(SYS_brk, r.start);
}

/* A stack right above, and one a page further, that grow over it */
static void do_grow(struct range r)
{
	for (int gap = 0; gap < 2; gap++) {
		char *stack = mmap(at(r) + r.len + gap * PAGE, PAGE, PROT_READ | PROT_WRITE,
				   MAP_PRIVATE | MAP_ANONYMOUS | MAP_GROWSDOWN |
				   MAP_FIXED_NOREPLACE, -1, 0);

		if (stack != MAP_FAILED && fork() == 0) {
			((volatile char *)stack)[-(long)PAGE * gap - 8] = 1;
			_exit(0);
		}
	}
	while (wait(NULL) > 0)
		;
}

static void do_userfault(struct range r)
{
	struct uffdio_api api = { .api = UFFD_API };
	struct uffdio_register reg = {
		.range = { r.start, r.len },
		.mode = UFFDIO_REGISTER_MODE_MISSING,
	};
	struct uffdio_zeropage zero = { .range = { r.start, r.len } };
	int fd = syscall(SYS_userfaultfd, O_NONBLOCK | 1);

	ioctl(fd, UFFDIO_API, &api);
	ioctl(fd, UFFDIO_REGISTER, &reg);
	ioctl(fd, UFFDIO_ZEROPAGE, &zero);
}

static void do_lock(struct range r)
{
	mlock(at(r), r.len);
	mlock2(at(r), r.len, MLOCK_ONFAULT);
	munlock(at(r), r.len);
	msync(at(r), r.len, MS_SYNC | MS_INVALIDATE);
}

static void do_name(struct range r)
{
	prctl(PR_SET_VMA, PR_SET_VMA_ANON_NAME, r.start, r.len, "mine");
	syscall(__NR_mseal, at(r), r.len, 0);
}

static void do_write(struct range r)
{
	char zeros[64] = "";
	struct iovec from = { zeros, sizeof(zeros) }, to = { at(r), sizeof(zeros) };
	int fd = open("/proc/self/mem", O_RDWR);

	pwrite(fd, zeros, sizeof(zeros), r.start + 64);
	process_vm_writev(getpid(), &from, 1, &to, 1, 0);
}

static const struct {
	const char *name;
	void (*run)(struct range r);
} calls[] = {
	{ "mmap", do_mmap }, { "mmap_shared", do_mmap_shared }, { "mmap_file", do_mmap_file },
	{ "mmap_none", do_mmap_none }, { "munmap", do_munmap }, { "mremap_away", do_mremap_away },
	{ "mremap_copy", do_mremap_copy }, { "mremap_size", do_mremap_size },
	{ "mremap_onto", do_mremap_onto }, { "mprotect", do_mprotect }, { "madvise", do_madvise },
	{ "process_madvise", do_process_madvise }, { "remap_file_pages", do_remap_file_pages },
	{ "shmat", do_shmat }, { "brk", do_brk }, { "grow", do_grow },
	{ "userfault", do_userfault }, { "lock", do_lock }, { "name", do_name },
	{ "write", do_write },
};
#define CALLS (int)(sizeof(calls) / sizeof(*calls))

static char before[TEXT_MAX];

static int is_as_before(void)
{
	char now[TEXT_MAX];

	look(now, 0);
	return !strcmp(before, now) && getppid() > 0;
}

/* 0 if nothing has changed, for the child or a child of its own. */
static int try(int call, struct range r)
{
	int status;
	pid_t child = fork();

	if (child == 0) {
		alarm(SECONDS_MAX);
		calls[call].run(r);
		if (!is_as_before())
			_exit(1);
		if (fork() == 0)
			_exit(is_as_before() ? 0 : 2);
		wait(&status);
		_exit(WIFEXITED(status) ? WEXITSTATUS(status) : 3);
	}
	waitpid(child, &status, 0);
	return status;
}

static int try_all(void)
{
	int tried = 0, changed = 0;

	for (int s = 0; s < special_count; s++) {
		struct range whole = specials[s].range;
		unsigned long last = whole.start + whole.len - PAGE;
		struct range ranges[] = {
			whole, { whole.start, PAGE }, { last, PAGE },
			{ whole.start + PAGE, whole.len > PAGE ? whole.len - PAGE : PAGE },
			{ whole.start - PAGE, whole.len + 2 * PAGE },
			{ whole.start - PAGE, 2 * PAGE }, { last, 2 * PAGE },
		};

		for (unsigned i = 0; i < sizeof(ranges) / sizeof(*ranges); i++)
			for (int call = 0; call < CALLS; call++, tried++) {
				int status = try(call, ranges[i]);

				if (!status)
					continue;
				changed++;
				printf("%s %s %d: changed (%x)\n", specials[s].name,
				       calls[call].name, i, status);
			}
	}
	printf("%d mappings, %d tries, %d changed\n", special_count, tried, changed);
	return changed != 0;
}

/* Between what gates are, and before the image: nobody has these. */
static const unsigned long holes[] = {
	0x5f000000, 0x5f001000, 0x5f03f000, 0x5f05f000, 0x5f080000, 0x5f0fe000,
};

static void touch(unsigned long address, int how)
{
	volatile char *p = (void *)address;

	if (how == 0)
		(void)*p;
	else if (how == 1)
		*p = 1;
	else
		((void (*)(void))address)();
}

static int faults(void)
{
	int wrong = 0, status, tried = 0;

	for (unsigned h = 0; h < sizeof(holes) / sizeof(*holes); h++)
		for (int how = 0; how < 3; how++, tried++) {
			pid_t child = fork();

			if (child == 0) {
				alarm(SECONDS_MAX);
				touch(holes[h], how);
				_exit(0);
			}
			waitpid(child, &status, 0);
			if (WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV)
				continue;
			wrong++;
			printf("%lx, %d: %x\n", holes[h], how, status);
		}
	printf("%d touched, %d did not end by SIGSEGV\n", tried, wrong);
	return wrong != 0;
}

#define STALE_PAGES 64UL
#define MARK 0x0101010101010101UL

static char *map(unsigned long where, int prot)
{
	return mmap((void *)where, STALE_PAGES * PAGE, prot,
		    MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
}

/* Pages with a mark at @old, when a mapping has moved there of which one page is used. */
static int count_stale(unsigned long where)
{
	unsigned long len = STALE_PAGES * PAGE;
	volatile char *old = map(where, PROT_READ | PROT_WRITE);
	char *new = map(ELSEWHERE, PROT_READ | PROT_WRITE);
	int stale = 0;

	for (unsigned long i = 0; i < len; i += PAGE)
		*(unsigned long *)(old + i) = MARK;
	new[0] = 1;
	if (mremap(new, len, len, MREMAP_MAYMOVE | MREMAP_FIXED, old) != old)
		return 99;
	for (unsigned long i = 0; i < len; i += PAGE)
		stale += *(volatile unsigned long *)(old + i) == MARK;
	munmap((void *)old, len);
	return stale;
}

static int stale(void)
{
	/* Alone in their page table, in a table of those, and in one of these */
	static const unsigned long places[] = { 0x210000000, 0x300000000, 0x10000000000 };
	int seen = 0;

	for (int i = 0; i < 3; i++)
		seen += count_stale(places[i]);
	printf("%d stale pages\n", seen);
	return seen != 0;
}

int main(int argc, char **argv)
{
	setbuf(stdout, NULL);
	if (argc > 1 && !strcmp(argv[1], "stale"))
		return stale();
	if (argc > 1 && !strcmp(argv[1], "faults"))
		return faults();
	look(before, 1);
	return try_all();
}
