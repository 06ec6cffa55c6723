/* Clocks and timers: that they run, in the right direction, and end a wait. */
#include "conform.h"

#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/timerfd.h>

static volatile int rings;

static void on_ring(int signal)
{
	(void)signal;
	rings++;
}

static long ms_of(clockid_t clock)
{
	struct timespec t;

	clock_gettime(clock, &t);
	return t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static int after(const struct timespec *a, const struct timespec *b)
{
	return a->tv_sec > b->tv_sec || (a->tv_sec == b->tv_sec && a->tv_nsec > b->tv_nsec);
}

/* How often what libc reads by itself and what the kernel says are not in order. */
static int disorder(clockid_t clock)
{
	struct timespec first, kernel, last;
	int wrong = 0;

	for (int i = 0; i < 5000; i++) {
		clock_gettime(clock, &first);
		syscall(SYS_clock_gettime, clock, &kernel);
		clock_gettime(clock, &last);
		wrong += after(&first, &kernel) || after(&kernel, &last);
	}
	return wrong;
}

static void clocks(void)
{
	static const clockid_t all[] = { CLOCK_REALTIME, CLOCK_MONOTONIC, CLOCK_BOOTTIME,
					 CLOCK_MONOTONIC_RAW, CLOCK_REALTIME_COARSE, CLOCK_TAI };

	for (size_t c = 0; c < sizeof(all) / sizeof(*all); c++) {
		long before = ms_of(all[c]), slept;

		usleep(60000);
		slept = ms_of(all[c]) - before;
		say("clock %d sleeps right %d", all[c], slept >= 40 && slept < 20000);
	}
	struct timespec last = { 0, 0 }, now;
	int back = 0;
	for (int i = 0; i < 20000; i++) {
		clock_gettime(CLOCK_MONOTONIC, &now);
		back += after(&last, &now);
		last = now;
	}
	say("went back %d times", back);
	for (size_t c = 0; c < sizeof(all) / sizeof(*all); c++)
		say("clock %d is the kernel's, but for %d", all[c], disorder(all[c]));
	clock_getres(CLOCK_MONOTONIC, &now);
	say("resolution %ld", now.tv_nsec);
}

static void spend(clockid_t clock, long ms)
{
	long until = ms_of(clock) + ms;

	while (ms_of(clock) < until)
		;
}

static void processor_time(void)
{
	struct rusage usage;
	long before = ms_of(CLOCK_PROCESS_CPUTIME_ID);

	spend(CLOCK_MONOTONIC, 200);
	say("counts work %d", ms_of(CLOCK_PROCESS_CPUTIME_ID) > before);
	before = ms_of(CLOCK_THREAD_CPUTIME_ID);
	usleep(100000);
	say("not sleep %d", ms_of(CLOCK_THREAD_CPUTIME_ID) - before < 50);
	getrusage(RUSAGE_SELF, &usage);
	say("used %d", usage.ru_utime.tv_usec + usage.ru_stime.tv_usec > 0 ||
		       usage.ru_utime.tv_sec + usage.ru_stime.tv_sec > 0);
}

static void itimers(void)
{
	struct itimerval soon = { { 0, 20000 }, { 0, 20000 } }, left;

	signal(SIGALRM, on_ring);
	rings = 0;
	setitimer(ITIMER_REAL, &soon, NULL);
	while (rings < 5)
		pause();
	getitimer(ITIMER_REAL, &left);
	say("interval %ld", left.it_interval.tv_usec);
	setitimer(ITIMER_REAL, &(struct itimerval){ 0 }, NULL);
	say("real rang");
}

/* For five seconds at most, of which a timer of 20 ms needs few. */
static void work_until_it_rings(void)
{
	long until = ms_of(CLOCK_MONOTONIC) + 5000;

	while (!rings && ms_of(CLOCK_MONOTONIC) < until)
		for (volatile int i = 0; i < 100000; i++)
			;
}

static void virtual_itimer(void)
{
	struct itimerval soon = { { 0, 20000 }, { 0, 20000 } };

	signal(SIGVTALRM, on_ring);
	rings = 0;
	setitimer(ITIMER_VIRTUAL, &soon, NULL);
	work_until_it_rings();
	setitimer(ITIMER_VIRTUAL, &(struct itimerval){ 0 }, NULL);
	say("rang %d", rings > 0);
}

static void profiling_itimer(void)
{
	struct itimerval soon = { { 0, 20000 }, { 0, 20000 } };

	signal(SIGPROF, on_ring);
	rings = 0;
	setitimer(ITIMER_PROF, &soon, NULL);
	work_until_it_rings();
	setitimer(ITIMER_PROF, &(struct itimerval){ 0 }, NULL);
	say("rang %d", rings > 0);
}

/* A program in a loop without calls is interrupted. */
static void spins_are_interrupted(void)
{
	struct itimerval soon = { { 0, 0 }, { 0, 50000 } };

	signal(SIGALRM, on_ring);
	rings = 0;
	setitimer(ITIMER_REAL, &soon, NULL);
	while (!rings)
		;
	say("interrupted");
}

static void posix_timers(void)
{
	struct sigevent event = { .sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGRTMIN,
				  .sigev_value.sival_int = 5 };
	struct itimerspec soon = { { 0, 10000000 }, { 0, 10000000 } };
	siginfo_t info;
	sigset_t set;
	timer_t timer;

	sigemptyset(&set);
	sigaddset(&set, SIGRTMIN);
	sigprocmask(SIG_BLOCK, &set, NULL);
	say_call("create", timer_create(CLOCK_MONOTONIC, &event, &timer));
	timer_settime(timer, 0, &soon, NULL);
	sigwaitinfo(&set, &info);
	say("code %d value %d", info.si_code, info.si_value.sival_int);
	usleep(100000);
	sigwaitinfo(&set, &info);
	say("overrun %d", info.si_overrun > 0);
	say_call("delete", timer_delete(timer));
}

static void timer_files(void)
{
	struct itimerspec soon = { { 0, 0 }, { 0, 600000000 } };
	int fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
	uint64_t rang;

	timerfd_settime(fd, 0, &soon, NULL);
	say_call("too early", read(fd, &rang, sizeof(rang)));
	usleep(900000);
	say_call("in time", read(fd, &rang, sizeof(rang)));
	say("%lu", rang);
}

const struct fact timers[] = {
	{ "clocks", clocks },
	{ "processor_time", processor_time },
	{ "itimers", itimers },
	{ "virtual_itimer", virtual_itimer },
	{ "profiling_itimer", profiling_itimer },
	{ "spins_are_interrupted", spins_are_interrupted },
	{ "posix_timers", posix_timers },
	{ "timer_files", timer_files },
	{ 0 },
};
