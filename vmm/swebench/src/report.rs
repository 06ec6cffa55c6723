//! The final report of a run, schema 2.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use serde::Serialize;
use serde_json::Value;

use crate::dataset::{Instance, Predictions};
use crate::failure::{self, Tier};
use crate::place::{LOG, Place, REPORT, TEST_OUTPUT};

type Ids = BTreeSet<String>;

/// What is in `MODEL.RUN_ID.json`.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
pub struct Report {
    pub total_instances: usize,
    pub submitted_instances: usize,
    pub completed_instances: usize,
    pub resolved_instances: usize,
    pub unresolved_instances: usize,
    pub infra_failure_instances: usize,
    pub ambiguous_failure_instances: usize,
    pub empty_patch_instances: usize,
    pub error_instances: usize,
    pub completed_ids: Ids,
    pub incomplete_ids: Ids,
    pub empty_patch_ids: Ids,
    pub submitted_ids: Ids,
    pub resolved_ids: Ids,
    pub unresolved_ids: Ids,
    pub infra_failure_ids: Ids,
    pub ambiguous_failure_ids: Ids,
    pub failure_reasons: BTreeMap<String, String>,
    pub error_ids: Ids,
    pub schema_version: u32,
}

impl Report {
    /// Reads what the run at `place` left of each of `instances`.
    pub fn of(instances: &[Instance], predictions: &Predictions, place: &Place) -> Self {
        let mut own = Self { schema_version: 2, ..Self::default() };
        own.submitted_ids = predictions.keys().cloned().collect();
        for instance in instances {
            own.add(&instance.instance_id, predictions, place);
        }
        own.total_instances = instances.len();
        own.submitted_instances = own.submitted_ids.len();
        own.completed_instances = own.completed_ids.len();
        own.resolved_instances = own.resolved_ids.len();
        own.unresolved_instances = own.unresolved_ids.len();
        own.infra_failure_instances = own.infra_failure_ids.len();
        own.ambiguous_failure_instances = own.ambiguous_failure_ids.len();
        own.empty_patch_instances = own.empty_patch_ids.len();
        own.error_instances = own.error_ids.len();
        own
    }

    fn add(&mut self, id: &str, predictions: &Predictions, place: &Place) {
        let own = id.to_owned();
        let Some(prediction) = predictions.get(id) else {
            self.incomplete_ids.insert(own);
            return;
        };
        if prediction.patch().is_none() {
            self.empty_patch_ids.insert(own);
            return;
        }
        let folder = place.of(prediction);
        let text = fs::read_to_string(folder.join(REPORT));
        if text.is_ok() {
            self.completed_ids.insert(own.clone());
        }
        match text.ok().and_then(|text| resolved(id, &text)) {
            Some(true) => {
                self.resolved_ids.insert(own);
                return;
            }
            Some(false) => self.unresolved_ids.insert(own.clone()),
            None => self.error_ids.insert(own.clone()),
        };
        if let Some((reason, tier)) = reason(&folder) {
            match tier {
                Tier::Environment => self.infra_failure_ids.insert(own.clone()),
                Tier::Ambiguous => self.ambiguous_failure_ids.insert(own.clone()),
            };
            self.failure_reasons.insert(own, reason.to_owned());
        }
    }
}

/// What a `report.json` says; `None` where it says nothing.
fn resolved(id: &str, text: &str) -> Option<bool> {
    serde_json::from_str::<Value>(text).ok()?[id]["resolved"].as_bool()
}

fn reason(folder: &Path) -> Option<(&'static str, Tier)> {
    let read = |name: &str| fs::read(folder.join(name)).unwrap_or_default();
    let text = [read(TEST_OUTPUT), read(LOG)].join(&b'\n');
    failure::classify(&String::from_utf8_lossy(&text))
}
