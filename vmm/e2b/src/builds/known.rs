//! The builds that there are and were.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use exocell_cell::images::Reference;
use exocell_cell::now_ms;

use super::log::Log;
use crate::bounds::Share;
use crate::error::{Problem, Result};
use crate::keys::Tenant;

/// Builds that are remembered, of all tenants; of one those that have not ended, and those that
/// have.
const BUILDS_MAX: usize = 1000;
const OPEN_MAX: usize = 8;
const ENDED_MAX: usize = 16;
/// How long one is remembered that was not started, or has ended.
const KEPT_MS: u64 = 3600 * 1000;

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Stage {
    #[default]
    Waiting,
    Building,
    Ready,
    /// Why, and at which step.
    Failed(String),
}

/// What has become of a build.
pub struct Told {
    pub stage: Stage,
    pub log: Log,
    ended_ms: Option<u64>,
}

/// One build.
pub struct Build {
    pub tenant: String,
    pub name: String,
    pub tags: Vec<Reference>,
    pub labels: Vec<(String, String)>,
    begun_ms: u64,
    /// What it takes, once it is started.
    pub archives: OnceLock<Vec<PathBuf>>,
    told: Mutex<Told>,
}

impl Build {
    /// One that waits for its archives; what it says is held by `log`.
    pub fn new(
        tenant: &str,
        name: String,
        tags: Vec<Reference>,
        labels: Vec<(String, String)>,
        log: Share,
    ) -> Self {
        Self {
            tenant: tenant.to_owned(),
            name,
            tags,
            labels,
            begun_ms: now_ms(),
            archives: OnceLock::new(),
            told: Mutex::new(Told { stage: Stage::default(), log: Log::new(log), ended_ms: None }),
        }
    }

    pub fn told(&self) -> MutexGuard<'_, Told> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_open(&self) -> bool {
        self.told().ended_ms.is_none()
    }

    /// Whether nobody wants it any more at `now_ms`.
    fn is_over(&self, now_ms: u64) -> bool {
        let told = self.told();
        match (told.ended_ms, &told.stage) {
            (Some(ended), _) => now_ms.saturating_sub(ended) > KEPT_MS,
            (None, Stage::Waiting) => now_ms.saturating_sub(self.begun_ms) > KEPT_MS,
            (None, _) => false,
        }
    }

    pub fn end(&self, stage: Stage) {
        let mut told = self.told();
        told.log.end();
        told.stage = stage;
        told.ended_ms = Some(now_ms());
    }
}

/// See the module's head.
#[derive(Default)]
pub struct Known(Mutex<HashMap<String, Arc<Build>>>);

impl Known {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Arc<Build>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets what nobody has come back for by `now_ms`.
    pub fn tidy(&self, now_ms: u64) {
        self.lock().retain(|_, build| !build.is_over(now_ms));
    }

    /// Archives that builds will take.
    pub fn wanted(&self) -> Vec<PathBuf> {
        let all = self.lock();
        let open = all.values().filter(|build| build.is_open());
        open.filter_map(|build| build.archives.get()).flatten().cloned().collect()
    }

    /// # Errors
    /// 404.
    pub fn find(&self, tenant: &Tenant, template: &str, id: &str) -> Result<Arc<Build>> {
        let found = self.lock().get(id).cloned();
        let is_own = |build: &Arc<Build>| build.tenant == tenant.name && build.name == template;
        found.filter(is_own).ok_or_else(|| {
            Problem::not_found(format!(
                "build {id:?} was not found; one that is not started, or has ended, is forgotten \
                 after an hour"
            ))
        })
    }

    /// Remembers `build` in the place of the oldest that has ended.
    ///
    /// # Errors
    /// 429: there are as many as there may be.
    pub fn add(&self, id: String, build: Build) -> Result<()> {
        let mut all = self.lock();
        all.retain(|_, other| !other.is_over(build.begun_ms));
        let own = all.iter().filter(|(_, it)| it.tenant == build.tenant);
        let (open, ended): (Vec<_>, Vec<_>) = own.partition(|(_, it)| it.is_open());
        if open.len() >= OPEN_MAX {
            return Err(Problem::exhausted(format!(
                "{OPEN_MAX} builds of this key have not ended; wait for one. One that is not \
                 started is forgotten after an hour"
            )));
        }
        let place = match () {
            () if ended.len() >= ENDED_MAX => Some(oldest(ended)),
            () if all.len() >= BUILDS_MAX => {
                Some(oldest(all.iter().filter(|(_, it)| !it.is_open())))
            }
            () => None,
        };
        if let Some(oldest) = place {
            let oldest = oldest.ok_or_else(|| Problem::exhausted("there are too many builds"))?;
            all.remove(&oldest);
        }
        all.insert(id, Arc::new(build));
        Ok(())
    }
}

fn oldest<'a>(all: impl IntoIterator<Item = (&'a String, &'a Arc<Build>)>) -> Option<String> {
    all.into_iter().min_by_key(|(_, it)| it.begun_ms).map(|(id, _)| id.clone())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bounds::Shares;
    use crate::keys;

    fn add(known: &Known, tenant: &str, begun_ms: u64) -> Result<String> {
        let log = Shares::new(1 << 20).none(tenant);
        let build = Build::new(tenant, "a".to_owned(), Vec::new(), Vec::new(), log);
        let id = keys::random().unwrap();
        known.add(id.clone(), Build { begun_ms, ..build }).map(|()| id)
    }

    fn end_all(known: &Known) {
        known.lock().values().filter(|it| it.is_open()).for_each(|it| it.end(Stage::Ready));
    }

    #[test]
    fn builds_that_nobody_starts_are_forgotten() {
        let (known, now) = (Known::default(), now_ms());
        for _ in 0..OPEN_MAX {
            add(&known, "ann", now).unwrap();
        }
        assert_eq!(add(&known, "ann", now + KEPT_MS).unwrap_err().status, 429);
        add(&known, "bob", now + KEPT_MS).unwrap();
        // One that runs stays, and what it takes.
        let running = known.lock().values().find(|it| it.tenant == "ann").cloned().unwrap();
        running.told().stage = Stage::Building;
        running.archives.set(vec!["archive".into()]).unwrap();
        add(&known, "ann", now + KEPT_MS + 1).unwrap();
        assert_eq!(known.lock().values().filter(|it| it.tenant == "ann").count(), 2);
        assert_eq!(known.wanted(), [PathBuf::from("archive")]);
        running.end(Stage::Ready);
        assert!(known.wanted().is_empty());
    }

    #[test]
    fn a_tenants_last_builds_are_remembered_for_an_hour() {
        let (known, now) = (Known::default(), now_ms());
        let first = add(&known, "ann", now - 1).unwrap();
        for _ in 1..ENDED_MAX {
            end_all(&known);
            add(&known, "ann", now).unwrap();
        }
        end_all(&known);
        add(&known, "bob", now).unwrap();
        assert!(known.lock().contains_key(&first));
        add(&known, "ann", now).unwrap();
        assert!(!known.lock().contains_key(&first), "the oldest has gone");
        assert_eq!(known.lock().len(), ENDED_MAX + 1);
        known.tidy(now_ms() + 2 * KEPT_MS);
        assert_eq!(known.lock().len(), 0, "an hour is over");
    }
}
