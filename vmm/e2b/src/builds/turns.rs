//! Whose build runs next: the first one of those whose tenants run the fewest.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

/// Builds that run at once, and those of one tenant. One more runs for a tenant that has none.
const RUNNING_MAX: usize = 2;
const OF_ONE_MAX: usize = 2;

/// See the module's head.
#[derive(Default)]
pub struct Turns(Mutex<State>);

#[derive(Default)]
struct State {
    running: HashMap<String, usize>,
    waiting: VecDeque<(String, oneshot::Sender<Turn>)>,
}

/// The right to run one build, until it is dropped.
pub struct Turn {
    of: Arc<Turns>,
    tenant: String,
}

impl State {
    fn of(&self, tenant: &str) -> usize {
        self.running.get(tenant).copied().unwrap_or(0)
    }

    /// Takes out the one whose turn it is.
    fn next(&mut self) -> Option<(String, oneshot::Sender<Turn>)> {
        self.waiting.retain(|(_, sender)| !sender.is_closed());
        let (at, (tenant, _)) =
            self.waiting.iter().enumerate().min_by_key(|(_, (tenant, _))| self.of(tenant))?;
        let (own, all) = (self.of(tenant), self.running.values().sum::<usize>());
        let most = if own == 0 { RUNNING_MAX + 1 } else { RUNNING_MAX };
        if own >= OF_ONE_MAX || all >= most {
            return None;
        }
        let next = self.waiting.remove(at)?;
        *self.running.entry(next.0.clone()).or_default() += 1;
        Some(next)
    }
}

impl Turns {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the turn of one of `tenant`'s builds.
    pub async fn take(self: &Arc<Self>, tenant: &str) -> Option<Turn> {
        let (sender, told) = oneshot::channel();
        self.lock().waiting.push_back((tenant.to_owned(), sender));
        self.give();
        told.await.ok()
    }

    fn give(self: &Arc<Self>) {
        loop {
            let Some((tenant, sender)) = self.lock().next() else { return };
            // Who does not wait any more gives it back.
            let _ = sender.send(Turn { of: self.clone(), tenant });
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        {
            let mut state = self.of.lock();
            if let Some(count) = state.running.get_mut(&self.tenant) {
                *count -= 1;
                if *count == 0 {
                    state.running.remove(&self.tenant);
                }
            }
        }
        self.of.give();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::pin::Pin;

    type Waits = Pin<Box<dyn Future<Output = Option<Turn>>>>;

    /// Begins to wait, in this order.
    async fn wait(turns: &Arc<Turns>, tenant: &'static str) -> Waits {
        let turns = turns.clone();
        let mut waits: Waits = Box::pin(async move { turns.take(tenant).await });
        let now = now(&mut waits).await;
        match now {
            Some(turn) => Box::pin(async { Some(turn) }),
            None => waits,
        }
    }

    async fn now(waits: &mut Waits) -> Option<Turn> {
        tokio::select! { biased; turn = waits => turn, () = async {} => None }
    }

    #[tokio::test]
    async fn no_tenant_waits_for_all_of_anothers() {
        let turns: Arc<Turns> = Arc::default();
        let mut of_ann = Vec::new();
        for _ in 0..4 {
            of_ann.push(wait(&turns, "ann").await);
        }
        let mut running = Vec::new();
        for waits in &mut of_ann[..2] {
            running.push(now(waits).await.expect("nobody else waits"));
        }
        assert!(now(&mut of_ann[2]).await.is_none());
        let bob = now(&mut wait(&turns, "bob").await).await.expect("he has none");
        let mut second = wait(&turns, "bob").await;
        let mut carl = wait(&turns, "carl").await;
        assert!(now(&mut second).await.is_none() && now(&mut carl).await.is_none());
        // Carl came last, and has none.
        drop(running.pop());
        let carl = now(&mut carl).await.expect("it is his turn");
        assert!(now(&mut of_ann[2]).await.is_none() && now(&mut second).await.is_none());
        drop((bob, carl));
        // Ann's third came before Bob's second, but she runs one.
        let bob = now(&mut second).await.expect("his turn");
        assert!(now(&mut of_ann[2]).await.is_none());
        // Who does not wait any more is passed over.
        drop(of_ann.remove(2));
        drop(bob);
        assert!(now(&mut of_ann[2]).await.is_some());
    }
}
