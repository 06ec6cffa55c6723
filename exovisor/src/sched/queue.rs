//! The order of calls: weighted fair queuing over tenants, by the ends of their time slices in
//! virtual time (Demers, Keshav and Shenker 1989, "Analysis and simulation of a fair queueing
//! algorithm", with lengths that are estimated). No clock, no lock, no thread in here.
//!
//! Each tenant has a virtual time that grows with the CPU time it used, slower the greater its
//! weight. Of the tenants with something to run, the one with the highest priority goes first, and
//! then the one whose next time slice will end first in virtual time, if it is as long as its time
//! slices have been of late: virtual time grows in steps of a slice, and a tenant with short calls
//! that uses less than its share does not wait for whole slices of others. A tenant that was idle
//! is a slice ahead of those that were not, at most. At dispatch a whole slice is charged in
//! advance, so that several workers do not all pick the same tenant; what was not used is given
//! back.
//!
//! Within a tenant calls are served in the order in which they came. A preempted call goes to the
//! end. Only so many of a tenant's items are begun at a time, since each that is holds a stack and
//! an instance: a tenant whose calls do not end leaves those of others alone.

use std::collections::{BTreeSet, VecDeque};

/// Virtual nanoseconds of a tenant of weight 1 for each of its nanoseconds.
const SCALE: u64 = 1 << 10;

/// Part of a slice that a tenant's time slices are thought to last before it has had one: less than
/// those of who never ends, or a new tenant's call would wait for a slice of each of them, and
/// enough not to be before those that are known to be short.
const FIRST_SLICE: u64 = 4;

/// A class above or below others: as long as a higher one has work, a lower one waits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Priority {
    /// Before all others.
    High,
    /// For most.
    #[default]
    Normal,
    /// What others leave.
    Low,
}

/// Which of the queue's tenants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct TenantId(pub(super) usize);

#[derive(Debug)]
struct Tenant<T> {
    weight: u64,
    priority: Priority,
    /// In virtual nanoseconds.
    used: u64,
    /// How long its time slices have been of late, in nanoseconds.
    usual_ns: u64,
    /// Those begun, and those not, each with when it came.
    waiting: VecDeque<(u64, T)>,
    fresh: VecDeque<(u64, T)>,
    /// How many are begun and not over.
    begun: usize,
}

impl<T> Tenant<T> {
    fn cost(&self, ns: u64) -> u64 {
        ns.saturating_mul(SCALE) / self.weight
    }

    /// When a time slice will end that begins now, in virtual nanoseconds.
    fn end(&self) -> u64 {
        self.used.saturating_add(self.cost(self.usual_ns))
    }

    /// Whether the next is a fresh one; `None` if nothing can run.
    fn next_is_fresh(&self, begun_max: usize) -> Option<bool> {
        let fresh = self.fresh.front().filter(|_| self.begun < begun_max);
        match (self.waiting.front(), fresh) {
            (None, None) => None,
            (Some(_), None) => Some(false),
            (None, Some(_)) => Some(true),
            (Some((waiting, _)), Some((fresh, _))) => Some(fresh < waiting),
        }
    }
}

/// All tenants and what they want to run.
#[derive(Debug)]
pub(crate) struct Queue<T> {
    tenants: Vec<Tenant<T>>,
    /// Those with something waiting, best first, by the ends of their next time slices.
    ready: BTreeSet<(Priority, u64, TenantId)>,
    /// Where the last one that was picked began, in virtual time.
    now: u64,
    /// What it was charged in advance, in nanoseconds.
    slice_ns: u64,
    /// How many items came.
    came: u64,
    /// How many of one tenant may be begun and not over.
    begun_max: usize,
    /// How many are begun and wait.
    begun_waiting: usize,
    /// How many wait.
    len: usize,
}

impl<T> Queue<T> {
    /// At most `begun_max` items of one tenant are begun at a time, and time slices are at most
    /// `slice_ns` long.
    pub fn new(begun_max: usize, slice_ns: u64) -> Self {
        let (tenants, ready) = (Vec::new(), BTreeSet::new());
        let begun_max = begun_max.max(1);
        Self { tenants, ready, now: 0, slice_ns, came: 0, begun_max, begun_waiting: 0, len: 0 }
    }

    /// A new tenant. A weight of 0 counts as 1.
    pub fn add(&mut self, weight: u32, priority: Priority) -> TenantId {
        let weight = u64::from(weight.max(1));
        let (waiting, fresh) = (VecDeque::new(), VecDeque::new());
        let usual_ns = self.slice_ns / FIRST_SLICE;
        let tenant = Tenant { weight, priority, used: 0, usual_ns, waiting, fresh, begun: 0 };
        self.tenants.push(tenant);
        TenantId(self.tenants.len() - 1)
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.ready.is_empty()
    }

    /// How many items of all tenants wait.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether this tenant has nothing that waits or is begun.
    pub fn is_idle(&self, id: TenantId) -> bool {
        let idle = |tenant: &Tenant<T>| tenant.begun == 0 && tenant.fresh.is_empty();
        self.tenants.get(id.0).is_some_and(idle)
    }

    /// Whether a time slice of `one` would have gone before the one that `runs` has.
    pub fn is_before(&self, one: TenantId, runs: TenantId) -> bool {
        let tenants = self.tenants.get(one.0).zip(self.tenants.get(runs.0));
        tenants.is_some_and(|(one, runs)| (one.priority, one.end()) <= (runs.priority, runs.used))
    }

    /// How many of this tenant wait.
    pub fn waiting(&self, id: TenantId) -> usize {
        self.tenants.get(id.0).map_or(0, |tenant| tenant.waiting.len() + tenant.fresh.len())
    }

    /// How many of all tenants are begun and wait.
    pub fn begun_waiting(&self) -> usize {
        self.begun_waiting
    }

    /// Puts `item`, which is not begun, behind what its tenant already has.
    pub fn push(&mut self, id: TenantId, item: T) {
        self.came += 1;
        let came = self.came;
        self.catch_up(id);
        let Some(tenant) = self.tenants.get_mut(id.0) else { return };
        tenant.fresh.push_back((came, item));
        self.len += 1;
        self.make_ready(id);
    }

    /// Puts back what waited; its tenant may have been idle meanwhile.
    pub fn push_woken(&mut self, id: TenantId, item: T) {
        self.catch_up(id);
        self.push_again(id, item);
    }

    /// A tenant that had nothing waiting is not further ahead than a slice.
    fn catch_up(&mut self, id: TenantId) {
        let Some(tenant) = self.tenants.get_mut(id.0) else { return };
        if tenant.waiting.is_empty() && tenant.fresh.is_empty() {
            let ahead = tenant.cost(self.slice_ns);
            tenant.used = tenant.used.max(self.now.saturating_sub(ahead));
        }
    }

    /// Puts back what was preempted; its tenant was not idle meanwhile.
    pub fn push_again(&mut self, id: TenantId, item: T) {
        self.came += 1;
        let came = self.came;
        let Some(tenant) = self.tenants.get_mut(id.0) else { return };
        tenant.waiting.push_back((came, item));
        self.begun_waiting += 1;
        self.len += 1;
        self.make_ready(id);
    }

    /// Puts `item` where it counts as begun already; false if too many are.
    pub fn push_begun(&mut self, id: TenantId, item: T) -> bool {
        match self.tenants.get_mut(id.0) {
            Some(tenant) if tenant.begun < self.begun_max => tenant.begun += 1,
            _ => return false,
        }
        self.push_woken(id, item);
        true
    }

    /// One that was begun is over.
    pub fn ended(&mut self, id: TenantId) {
        if let Some(tenant) = self.tenants.get_mut(id.0) {
            tenant.begun = tenant.begun.saturating_sub(1);
            self.make_ready(id);
        }
    }

    fn make_ready(&mut self, id: TenantId) {
        let Some(tenant) = self.tenants.get(id.0) else { return };
        if tenant.next_is_fresh(self.begun_max).is_some() {
            self.ready.insert((tenant.priority, tenant.end(), id));
        }
    }

    /// What runs next, with `slice_ns` of its tenant's account charged.
    pub fn pop(&mut self, slice_ns: u64) -> Option<(TenantId, T)> {
        let (_, _, id) = self.ready.pop_first()?;
        let tenant = self.tenants.get_mut(id.0)?;
        let (_, item) = match tenant.next_is_fresh(self.begun_max)? {
            true => {
                tenant.begun += 1;
                tenant.fresh.pop_front()?
            }
            false => {
                self.begun_waiting = self.begun_waiting.saturating_sub(1);
                tenant.waiting.pop_front()?
            }
        };
        self.len = self.len.saturating_sub(1);
        self.now = self.now.max(tenant.used);
        self.slice_ns = slice_ns;
        tenant.used = tenant.used.saturating_add(tenant.cost(slice_ns));
        self.make_ready(id);
        Some((id, item))
    }

    /// Replaces the `slice_ns` charged by [`Queue::pop`] with what was used. A time slice that was
    /// `cut` short would have been a slice long.
    pub fn settle(&mut self, id: TenantId, slice_ns: u64, used_ns: u64, cut: bool) {
        let Some(tenant) = self.tenants.get_mut(id.0) else { return };
        let before = tenant.end();
        let given_back = tenant.used.saturating_sub(tenant.cost(slice_ns));
        tenant.used = given_back.saturating_add(tenant.cost(used_ns));
        tenant.usual_ns = tenant.usual_ns.midpoint(if cut { slice_ns } else { used_ns });
        if tenant.end() != before && self.ready.remove(&(tenant.priority, before, id)) {
            self.ready.insert((tenant.priority, tenant.end(), id));
        }
    }

    /// Takes everything out.
    pub fn drain(&mut self) -> Vec<T> {
        self.ready.clear();
        self.begun_waiting = 0;
        self.len = 0;
        let all = |tenant: &mut Tenant<T>| {
            let items: Vec<(u64, T)> =
                tenant.waiting.drain(..).chain(tenant.fresh.drain(..)).collect();
            items.into_iter().map(|(_, item)| item)
        };
        self.tenants.iter_mut().flat_map(all).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Runs `turns` time slices of `slice` on `workers`, every tenant always having work, and
    /// answers with the time that each tenant had.
    fn shares(
        weights: &[u32],
        workers: usize,
        turns: usize,
        used: impl Fn(usize) -> u64,
    ) -> Vec<u64> {
        let mut queue = Queue::new(100, 1_000);
        let ids: Vec<TenantId> =
            weights.iter().map(|weight| queue.add(*weight, Priority::Normal)).collect();
        for id in &ids {
            for _ in 0..workers {
                queue.push(*id, ());
            }
        }
        let mut had = vec![0; weights.len()];
        let mut running = VecDeque::new();
        for turn in 0..turns {
            let (id, ()) = queue.pop(1_000).unwrap();
            running.push_back(id);
            if running.len() == workers {
                let id = running.pop_front().unwrap();
                let used = used(turn);
                queue.settle(id, 1_000, used, false);
                queue.push_again(id, ());
                had[id.0] += used;
            }
        }
        had
    }

    #[test]
    fn shares_are_as_the_weights() {
        for workers in [1, 2, 8] {
            let had = shares(&[4, 2, 1], workers, 7_000, |_| 1_000);
            let one = had.iter().sum::<u64>() as f64 / 7.0;
            for (had, weight) in had.iter().zip([4.0, 2.0, 1.0]) {
                let error = (*had as f64 / (one * weight) - 1.0).abs();
                assert!(error < 0.01, "{workers} workers: {had} for weight {weight}");
            }
        }
    }

    #[test]
    fn an_idle_tenant_earns_nothing() {
        let mut queue = Queue::new(100, 1_000);
        let (busy, idle) = (queue.add(1, Priority::Normal), queue.add(1, Priority::Normal));
        queue.push(busy, ());
        for _ in 0..1_000 {
            let (id, ()) = queue.pop(1_000_000).unwrap();
            queue.settle(id, 1_000_000, 1_000_000, true);
            queue.push_again(id, ());
        }
        queue.push(idle, ());
        queue.push(idle, ());
        let picked: Vec<TenantId> = (0..20)
            .map(|_| {
                let (id, ()) = queue.pop(1_000_000).unwrap();
                queue.settle(id, 1_000_000, 1_000_000, true);
                queue.push_again(id, ());
                id
            })
            .collect();
        // The first two, because the time slice of the busy one was its last charge, then by time
        // slices.
        assert_eq!(picked.iter().filter(|id| **id == idle).count(), 11, "{picked:?}");
    }

    #[test]
    fn a_higher_priority_goes_first() {
        let mut queue = Queue::new(100, 1_000);
        let low = queue.add(1_000, Priority::Low);
        let high = queue.add(1, Priority::High);
        queue.push(low, "low");
        queue.push(high, "high");
        assert_eq!(queue.pop(1).unwrap().1, "high");
        assert_eq!(queue.pop(1).unwrap().1, "low");
        assert!(queue.pop(1).is_none());
    }

    #[test]
    fn only_so_many_are_begun_at_a_time() {
        let mut queue = Queue::new(2, 1);
        let (many, few) = (queue.add(1, Priority::Normal), queue.add(1, Priority::Normal));
        (0..4).for_each(|item| queue.push(many, item));
        assert_eq!((queue.pop(1), queue.pop(1)), (Some((many, 0)), Some((many, 1))));
        assert!(queue.is_empty() && queue.pop(1).is_none());
        assert!(!queue.push_begun(many, 9) && queue.push_begun(few, 9));
        assert_eq!(queue.pop(1), Some((few, 9)));
        // Those that are begun go on, and the end of one lets the next begin.
        queue.push_again(many, 0);
        assert_eq!(queue.pop(1), Some((many, 0)));
        queue.ended(many);
        assert_eq!((queue.pop(1), queue.waiting(many)), (Some((many, 2)), 1));
        assert_eq!((queue.pop(1), queue.drain()), (None, vec![3]));
    }

    #[test]
    fn who_was_idle_is_before_who_runs() {
        let mut queue = Queue::new(100, 1_000);
        let [runs, comes, low] = [Priority::Normal, Priority::Normal, Priority::Low]
            .map(|priority| queue.add(1, priority));
        queue.push(runs, ());
        queue.pop(1_000).unwrap();
        assert!(!queue.is_idle(runs) && queue.is_idle(comes));
        queue.push(comes, ());
        queue.push(low, ());
        assert!(queue.is_before(comes, runs) && !queue.is_before(runs, comes));
        assert!(queue.is_before(runs, low) && !queue.is_before(low, runs));
        queue.settle(runs, 1_000, 1_000, true);
        queue.ended(runs);
        assert!(queue.is_idle(runs) && !queue.is_idle(comes));
    }

    /// Six tenants that always have work, on one worker, and one whose call takes 35 us and comes
    /// every `pause`, all in microseconds: how long its calls wait at most, if a time slice ends
    /// soon after one comes that is before it.
    fn longest_wait(pause: u64, calls: usize) -> u64 {
        const SLICE: u64 = 1_000;
        let mut queue = Queue::new(100, SLICE * 1_000);
        let comes = queue.add(1, Priority::Normal);
        let others: Vec<TenantId> = (0..6).map(|_| queue.add(1, Priority::Normal)).collect();
        others.iter().for_each(|id| queue.push(*id, 0));
        let (mut now, mut next, mut longest, mut served) = (0, pause, 0, 0);
        while served < calls {
            let (id, came) = queue.pop(SLICE * 1_000).unwrap();
            let mut end = now + if id == comes { 35 } else { SLICE };
            while next < end {
                queue.push(comes, next);
                if id != comes && queue.is_before(comes, id) {
                    end = end.min(next + 25);
                }
                next += pause;
            }
            queue.settle(id, SLICE * 1_000, (end - now) * 1_000, id != comes);
            if id == comes {
                served += 1;
                longest = longest.max(now - came);
                queue.ended(id);
            } else {
                queue.push_again(id, 0);
            }
            now = end;
        }
        longest
    }

    #[test]
    fn who_uses_less_than_its_share_does_not_wait_for_slices() {
        for pause in (300..3_000).step_by(17) {
            let waited = longest_wait(pause, 500);
            assert!(waited <= 60, "each {pause} us: {waited} us");
        }
    }

    #[test]
    fn a_new_tenant_goes_before_who_uses_whole_slices() {
        let mut queue = Queue::new(100, 1_000);
        let busy: Vec<TenantId> = (0..8).map(|_| queue.add(1, Priority::Normal)).collect();
        busy.iter().for_each(|id| queue.push(*id, ()));
        for _ in 0..100 {
            let (id, ()) = queue.pop(1_000).unwrap();
            queue.settle(id, 1_000, 1_000, true);
            queue.push_again(id, ());
        }
        let (runs, ()) = queue.pop(1_000).unwrap();
        let comes = queue.add(1, Priority::Normal);
        queue.push(comes, ());
        assert!(queue.is_before(comes, runs));
        queue.settle(runs, 1_000, 60, true);
        queue.push_again(runs, ());
        assert_eq!(queue.pop(1_000).unwrap().0, comes);
    }

    #[test]
    fn within_a_tenant_the_first_goes_first() {
        let mut queue = Queue::new(100, 1_000);
        let id = queue.add(0, Priority::Normal);
        for item in 0..3 {
            queue.push(id, item);
        }
        assert_eq!(queue.waiting(id), 3);
        assert_eq!(queue.pop(1).unwrap().1, 0);
        assert_eq!(queue.drain(), [1, 2]);
        assert_eq!((queue.waiting(id), queue.pop(1)), (0, None));
    }

    proptest! {
        /// Nobody with work is left out for longer than the others' time slices add up to, and a
        /// slice of each.
        #[test]
        fn nobody_starves(
            weights in prop::collection::vec(1u32..100, 2..8),
            used in 1u64..5_000,
            workers in 1usize..4,
        ) {
            let total: usize = weights.iter().map(|weight| *weight as usize).sum();
            let slices = total * 1_000 / used as usize;
            let had = shares(&weights, workers, slices + total * 10 + 10 * workers, |_| used);
            prop_assert!(had.iter().all(|had| *had > 0), "{had:?}");
        }
    }
}
