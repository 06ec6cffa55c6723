/* Other doors to the host's kernel than the syscall instruction. */
#include "attacks.h"

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

int int80(void)
{
	return in_child(mmap_by_int80, NULL);
}

int sysenter_(void)
{
	return in_child(mmap_by_sysenter, NULL);
}

int far_jump_32(void)
{
	return in_child(mmap_by_32_bit_code, NULL);
}

int vsyscall(void)
{
	return in_child(call_vsyscall, NULL);
}
