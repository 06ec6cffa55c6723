//! Whose sandbox boots next, where more are asked for than boot at once: tenants take turns, and
//! each one's requests are served in the order in which they came.
//!
//! ```text
//! request ─> its tenant's line ─> turn (round robin over tenants) ─> boots
//!    │ a line or the time is full: 429          │ nobody waits or boots
//!    └ who hangs up leaves the line             └─> spare: one boots for the pool
//! ```

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, oneshot};
use tokio::time::timeout;

use crate::error::{Problem, Result};

/// Requests that wait, of all tenants and of one.
const WAITING_MAX: usize = 1024;
const OF_ONE_MAX: usize = 512;
/// How long one waits: E2B's clients give a call 60 s, of which a boot takes some.
const WAIT_MAX: Duration = Duration::from_secs(50);
/// When a client that was refused may come again, in seconds.
const RETRY_AFTER: u64 = 5;
/// Cells that boot at once for the pool.
const SPARE_MAX: usize = 2;

/// See the module's head.
pub struct Queue {
    at_once: usize,
    wait_max: Duration,
    state: Mutex<State>,
    /// Told when nobody waits or boots any more.
    idle: Notify,
}

#[derive(Default)]
struct State {
    booting: usize,
    spare: usize,
    /// By tenant; the one whose turn is next comes first. No line is empty.
    lines: VecDeque<(String, VecDeque<oneshot::Sender<Turn>>)>,
}

/// The right to boot one sandbox, until it is dropped.
pub struct Turn {
    of: Arc<Queue>,
    is_spare: bool,
}

impl State {
    /// Forgets those who do not wait any more.
    fn tidy(&mut self) {
        for (_, line) in &mut self.lines {
            line.retain(|sender| !sender.is_closed());
        }
        self.lines.retain(|(_, line)| !line.is_empty());
    }

    fn add(&mut self, tenant: &str, sender: oneshot::Sender<Turn>) -> bool {
        self.tidy();
        let all: usize = self.lines.iter().map(|(_, line)| line.len()).sum();
        let known = self.lines.iter_mut().find(|(own, _)| own == tenant);
        let own = known.as_ref().map_or(0, |(_, line)| line.len());
        if all >= WAITING_MAX || own >= OF_ONE_MAX {
            return false;
        }
        match known {
            Some((_, line)) => line.push_back(sender),
            None => self.lines.push_back((tenant.to_owned(), VecDeque::from([sender]))),
        }
        true
    }

    fn next(&mut self) -> Option<oneshot::Sender<Turn>> {
        self.tidy();
        let (tenant, mut line) = self.lines.pop_front()?;
        let next = line.pop_front();
        if !line.is_empty() {
            self.lines.push_back((tenant, line));
        }
        next
    }
}

impl Queue {
    /// One in which `at_once` sandboxes boot at once.
    pub fn new(at_once: usize) -> Arc<Self> {
        Self::within(at_once, WAIT_MAX)
    }

    fn within(at_once: usize, wait_max: Duration) -> Arc<Self> {
        let at_once = at_once.max(1);
        Arc::new(Self { at_once, wait_max, state: Mutex::default(), idle: Notify::new() })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the turn of a sandbox of `tenant`'s.
    ///
    /// # Errors
    /// 429: too many wait, or it took too long.
    pub async fn take(self: &Arc<Self>, tenant: &str) -> Result<Turn> {
        let (sender, told) = oneshot::channel();
        let full = |what: String| {
            Problem::exhausted(format!("{what}; try again later"))
                .because("sandbox_queue_full")
                .after(RETRY_AFTER)
        };
        if !self.lock().add(tenant, sender) {
            return Err(full(format!(
                "{WAITING_MAX} requests wait for a sandbox, or {OF_ONE_MAX} of this key, as many \
                 as may"
            )));
        }
        self.give();
        match timeout(self.wait_max, told).await {
            Ok(Ok(turn)) => Ok(turn),
            _ => Err(full(format!(
                "the sandbox was not begun within {} s, for others were before it",
                self.wait_max.as_secs()
            ))),
        }
    }

    /// A turn for the pool, if nobody else has a use for it.
    pub fn spare(self: &Arc<Self>) -> Option<Turn> {
        let mut state = self.lock();
        state.tidy();
        if state.booting > 0 || !state.lines.is_empty() || state.spare >= SPARE_MAX {
            return None;
        }
        state.spare += 1;
        Some(Turn { of: self.clone(), is_spare: true })
    }

    /// Waits until there may be a turn for the pool.
    pub async fn idle(&self) {
        self.idle.notified().await;
    }

    fn give(self: &Arc<Self>) {
        loop {
            let mut state = self.lock();
            if state.booting >= self.at_once {
                return;
            }
            let Some(next) = state.next() else {
                if state.booting == 0 {
                    self.idle.notify_one();
                }
                return;
            };
            state.booting += 1;
            drop(state);
            // Who does not wait any more gives it back.
            drop(next.send(Turn { of: self.clone(), is_spare: false }));
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        {
            let mut state = self.of.lock();
            match self.is_spare {
                true => state.spare -= 1,
                false => state.booting -= 1,
            }
        }
        self.of.give();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::pin::Pin;

    type Waits = Pin<Box<dyn Future<Output = Result<Turn>>>>;

    /// Begins to wait, in this order.
    async fn wait(queue: &Arc<Queue>, tenant: &'static str) -> Waits {
        let queue = queue.clone();
        let mut waits: Waits = Box::pin(async move { queue.take(tenant).await });
        match now(&mut waits).await {
            Some(turn) => Box::pin(async { turn }),
            None => waits,
        }
    }

    async fn now(waits: &mut Waits) -> Option<Result<Turn>> {
        tokio::select! { biased; turn = waits => Some(turn), () = async {} => None }
    }

    #[tokio::test]
    async fn a_tenant_with_one_request_waits_for_one_of_anothers() {
        let queue = Queue::new(1);
        let mut of_ann = Vec::new();
        for _ in 0..200 {
            of_ann.push(wait(&queue, "ann").await);
        }
        let mut bob = wait(&queue, "bob").await;
        let mut carl = wait(&queue, "carl").await;
        let mut of_ann = of_ann.into_iter();
        let first = now(&mut of_ann.next().unwrap()).await.unwrap().unwrap();
        let mut second = of_ann.next().unwrap();
        assert!(now(&mut bob).await.is_none() && now(&mut second).await.is_none());
        drop(first);
        // Ann's line was there first.
        let second = now(&mut second).await.unwrap().unwrap();
        assert!(now(&mut bob).await.is_none());
        drop(second);
        let bob = now(&mut bob).await.unwrap().unwrap();
        let mut third = of_ann.next().unwrap();
        assert!(now(&mut carl).await.is_none() && now(&mut third).await.is_none());
        drop(bob);
        drop(now(&mut carl).await.unwrap().unwrap());
        let mut served = usize::from(now(&mut third).await.unwrap().is_ok());
        for mut waits in of_ann {
            served += usize::from(now(&mut waits).await.unwrap().is_ok());
        }
        assert_eq!(served, 198, "none is lost");
    }

    #[tokio::test]
    async fn who_goes_away_has_no_turn_and_the_pool_comes_last() {
        let queue = Queue::new(1);
        let first = wait(&queue, "ann").await.await.unwrap();
        let (gone, mut stays) = (wait(&queue, "ann").await, wait(&queue, "ann").await);
        drop(gone);
        assert!(queue.spare().is_none());
        drop(first);
        let turn = now(&mut stays).await.unwrap().unwrap();
        assert!(queue.spare().is_none());
        drop(turn);
        queue.idle().await;
        let spare = queue.spare().unwrap();
        // Who comes then does not wait for it.
        assert!(now(&mut wait(&queue, "bob").await).await.unwrap().is_ok());
        drop(spare);
        assert!(queue.lock().spare == 0 && queue.lock().booting == 0);
    }

    #[tokio::test]
    async fn a_line_is_bounded_in_length_and_time() {
        let queue = Queue::new(1);
        let _first = wait(&queue, "ann").await.await.unwrap();
        let mut all = Vec::new();
        for _ in 0..OF_ONE_MAX {
            all.push(wait(&queue, "ann").await);
        }
        let refused = now(&mut wait(&queue, "ann").await).await.unwrap().err().unwrap();
        assert_eq!((refused.status.as_u16(), refused.retry_after), (429, Some(RETRY_AFTER)));
        assert!(now(&mut wait(&queue, "bob").await).await.is_none());
        all.truncate(1);
        assert!(now(&mut wait(&queue, "ann").await).await.is_none(), "there is room again");
        let queue = Queue::within(1, Duration::ZERO);
        let _first = queue.take("ann").await.unwrap();
        assert_eq!(queue.take("ann").await.err().unwrap().status.as_u16(), 429);
    }
}
