//! `exocell doctor`: what this host offers, and what each lack costs.

use exocell_cell::CellError;
use exocell_cell::vmm::host;

use super::print_json;
use crate::args::DoctorArgs;
use crate::show;

/// Exit code 1 when something is missing that every cell needs.
pub fn doctor(args: &DoctorArgs) -> Result<u8, CellError> {
    let features = host::probe();
    if args.json {
        for feature in &features {
            print_json(feature, false)?;
        }
    } else {
        let rows: Vec<Vec<String>> = features
            .iter()
            .map(|feature| {
                let usable = if feature.usable { "yes" } else { "no" };
                vec![feature.name.to_owned(), usable.to_owned(), feature.why.clone()]
            })
            .collect();
        show::table(&["FEATURE", "USABLE", "WHY"], &rows);
    }
    Ok(u8::from(features.iter().any(|feature| feature.required && !feature.usable)))
}
