//! Waiting on and notifying of addresses: `memory.atomic.wait` for fibers.
//!
//! A thread that waits leaves its worker to others, so a barrier works with more threads than
//! workers, and an end from outside wakes it like any hostcall.

use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

/// The threads that wait on addresses of one shared memory.
#[derive(Default)]
pub(crate) struct Waits(Mutex<Spots>);

/// Waiting threads in the order in which they came. They are few. A list needs no allocation for
/// each of them, which another thread would free: the thread that notifies is rarely the one that
/// waited.
type Spots = Vec<(u64, Arc<Waiter>)>;

#[derive(Default)]
struct Waiter {
    woken: AtomicBool,
    waker: Mutex<Option<Waker>>,
}

/// A place in the queue of an address. Dropping it leaves the queue.
pub(crate) struct Waiting<'a> {
    waits: &'a Waits,
    waiter: Arc<Waiter>,
}

impl Waits {
    /// Queues up at `address` if `still` holds. Nobody notifies between the look and the place.
    pub fn enter<E>(
        &self,
        address: u64,
        still: impl FnOnce() -> Result<bool, E>,
    ) -> Result<Option<Waiting<'_>>, E> {
        let mut spots = self.spots();
        if !still()? {
            return Ok(None);
        }
        let waiter = Arc::new(Waiter::default());
        spots.push((address, Arc::clone(&waiter)));
        Ok(Some(Waiting { waits: self, waiter }))
    }

    /// Wakes up to `count` of those who wait at `address`, the first first; answers how many.
    pub fn notify(&self, address: u64, count: u32) -> u32 {
        let mut spots = self.spots();
        let mut left = count;
        let woken: Vec<_> = spots
            .extract_if(.., |(place, _)| {
                let wakes = *place == address && left > 0;
                left -= u32::from(wakes);
                wakes
            })
            .collect();
        woken.iter().for_each(|(_, waiter)| waiter.woken.store(true, Ordering::Release));
        drop(spots);
        woken.iter().for_each(|(_, waiter)| waiter.wake());
        count - left
    }

    fn spots(&self) -> MutexGuard<'_, Spots> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Waiter {
    fn wake(&self) {
        let waker = self.waker.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    fn poll(&self, waker: &Waker) -> Poll<()> {
        let mut kept = self.waker.lock().unwrap_or_else(PoisonError::into_inner);
        // The look comes after the lock, so that a wake-up is either seen or finds the waker.
        if self.woken.load(Ordering::Acquire) {
            return Poll::Ready(());
        }
        *kept = Some(waker.clone());
        Poll::Pending
    }
}

impl Waiting<'_> {
    /// Looks for as long as `more` says; whether somebody has notified.
    pub fn look(&self, more: impl Fn() -> bool) -> bool {
        loop {
            if self.waiter.woken.load(Ordering::Acquire) {
                return true;
            }
            if !more() {
                return false;
            }
            std::hint::spin_loop();
        }
    }

    /// Until somebody notifies.
    pub async fn woken(&self) {
        poll_fn(|context| self.waiter.poll(context.waker())).await;
    }

    /// Whether somebody has.
    pub fn is_woken(&self) -> bool {
        // Under the lock, so that it is not woken once the answer was no.
        let _spots = self.waits.spots();
        self.waiter.woken.load(Ordering::Acquire)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut spots = self.waits.spots();
        spots.retain(|(_, waiter)| !Arc::ptr_eq(waiter, &self.waiter));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;
    use std::pin::pin;
    use std::task::Context;

    fn enter(waits: &Waits, address: u64) -> Waiting<'_> {
        waits.enter(address, || Ok::<_, Infallible>(true)).unwrap().unwrap()
    }

    fn is_done(waiting: &Waiting<'_>) -> bool {
        let mut context = Context::from_waker(Waker::noop());
        pin!(waiting.woken()).as_mut().poll(&mut context).is_ready()
    }

    #[test]
    fn the_first_are_woken_first_and_only_at_their_address() {
        let waits = Waits::default();
        let waiting = [enter(&waits, 8), enter(&waits, 8), enter(&waits, 16)];
        assert_eq!(waits.notify(4, 9), 0);
        assert_eq!(waits.notify(8, 1), 1);
        assert_eq!(waiting.each_ref().map(is_done), [true, false, false]);
        assert_eq!(waits.notify(8, u32::MAX), 1);
        assert_eq!(waiting.each_ref().map(is_done), [true, true, false]);
    }

    #[test]
    fn who_leaves_is_not_counted() {
        let waits = Waits::default();
        drop(enter(&waits, 8));
        assert_eq!(waits.notify(8, 1), 0);
        assert!(waits.spots().is_empty());
    }

    #[test]
    fn who_looks_sees_that_it_was_notified_and_goes_on_no_longer_than_it_may() {
        let waits = Waits::default();
        let waiting = enter(&waits, 8);
        let looks = std::cell::Cell::new(0);
        let few = || looks.replace(looks.get() + 1) < 3;
        assert!(!waiting.look(few));
        assert_eq!(looks.get(), 4);
        std::thread::scope(|scope| {
            scope.spawn(|| assert_eq!(waits.notify(8, 1), 1));
            assert!(waiting.look(|| true));
        });
        drop(waiting);
        assert_eq!(waits.notify(8, 1), 0);
    }

    #[test]
    fn another_value_is_not_waited_for() {
        let waits = Waits::default();
        assert!(waits.enter(8, || Ok::<_, Infallible>(false)).unwrap().is_none());
        assert!(waits.enter(8, || Err(())).is_err());
        assert!(waits.spots().is_empty());
    }
}
