//! Who may have how many calls at once.
//!
//! Each call holds a connection until its answer is taken. A tenant may hold half of them. The last
//! quarter of all is for tenants that hold few: no two tenants, nor any number of them, keep another
//! out.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The places of all tenants.
#[derive(Debug)]
pub(crate) struct Places {
    all: usize,
    taken: Arc<Mutex<usize>>,
}

/// How many a tenant holds.
#[derive(Clone, Debug, Default)]
pub(crate) struct Held(Arc<Mutex<usize>>);

/// The right to one call, until it is dropped.
#[derive(Debug)]
pub(crate) struct Permit([Arc<Mutex<usize>>; 2]);

impl Drop for Permit {
    fn drop(&mut self) {
        for count in &self.0 {
            let mut count = lock(count);
            *count = count.saturating_sub(1);
        }
    }
}

fn lock(count: &Mutex<usize>) -> MutexGuard<'_, usize> {
    count.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Places {
    pub fn new(all: usize) -> Self {
        Self { all, taken: Arc::default() }
    }

    /// One more for the tenant that holds `held`, one of `tenants`.
    pub fn take(&self, held: &Held, tenants: usize) -> Option<Permit> {
        let mut taken = lock(&self.taken);
        let mut own = lock(&held.0);
        let kept = self.all / 4;
        let share = (kept / tenants.max(1)).max(1);
        let is_free = *own < (self.all / 2).max(1) && (*taken < self.all - kept || *own < share);
        is_free.then(|| {
            *taken += 1;
            *own += 1;
            Permit([self.taken.clone(), held.0.clone()])
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(places: &Places, held: &Held, tenants: usize) -> Vec<Permit> {
        std::iter::from_fn(|| places.take(held, tenants)).collect()
    }

    #[test]
    fn no_number_of_tenants_takes_all_places() {
        let places = Places::new(32);
        let [a, b, c, d] = [(); 4].map(|()| Held::default());
        let (of_a, of_b) = (take(&places, &a, 4), take(&places, &b, 4));
        assert_eq!((of_a.len(), of_b.len()), (16, 8));
        // What is kept is shared by those who have little.
        let (of_c, of_d) = (take(&places, &c, 4), take(&places, &d, 4));
        assert_eq!((of_c.len(), of_d.len()), (2, 2));
        drop(of_a);
        assert_eq!(take(&places, &c, 4).len(), 12);
        drop((of_b, of_c, of_d));
        assert!([a, b, c, d].iter().all(|held| *lock(&held.0) == 0));
        assert_eq!(*lock(&places.taken), 0);
    }

    #[test]
    fn where_there_are_few_each_has_one() {
        for all in 1..5 {
            let places = Places::new(all);
            let (a, b) = (Held::default(), Held::default());
            let _of_a = take(&places, &a, 1000);
            assert_eq!(take(&places, &b, 1000).len(), 1, "{all}");
        }
    }
}
