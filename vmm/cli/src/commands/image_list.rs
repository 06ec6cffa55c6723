//! `exocell image ls`, `inspect` and `history`.

use exocell_cell::CellError;
use exocell_cell::images::{ImageRecord, Store};
use exocell_docker::{Filters, OF_IMAGES, image_passes};
use serde_json::{Value, json};

use super::print_json;
use crate::args::{HistoryArgs, ImageInspectArgs, ImageLsArgs};
use crate::format::Template;
use crate::show::{self, say};

pub fn ls(store: &Store, args: &ImageLsArgs) -> Result<(), CellError> {
    let mut words = args.filter.clone();
    words.extend(args.name.iter().map(|name| format!("reference={name}")));
    let filters = Filters::of_words(&words, &OF_IMAGES)
        .map_err(|error| CellError::Usage(format!("--filter: {error}")))?;
    let mut records = store.list()?;
    records.retain(|record| image_passes(record, &filters));
    if args.quiet {
        records.iter().for_each(|record| say!("{}", id(record, args.no_trunc)));
        return Ok(());
    }
    if args.json {
        return records.iter().try_for_each(|record| print_json(&whole(record), false));
    }
    if let Some(text) = &args.format {
        let rows: Vec<Value> = records.iter().flat_map(|one| names(one, args.no_trunc)).collect();
        return Template::read(text)?.print(&rows);
    }
    let rows: Vec<Vec<String>> = records.iter().map(|one| columns(one, args.no_trunc)).collect();
    show::table(&["IMAGE", "ID", "SIZE", "IMPORTED"], &rows);
    Ok(())
}

fn whole(record: &ImageRecord) -> Value {
    json!({
        "id": record.id.to_string(), "tags": record.tags, "created": record.created,
        "size_bytes": record.size_bytes, "architecture": record.architecture,
    })
}

/// A row for each name, as docker has them.
fn names(record: &ImageRecord, no_trunc: bool) -> Vec<Value> {
    let none = ["<none>:<none>".to_owned()];
    let tags = if record.tags.is_empty() { &none[..] } else { &record.tags };
    let row = |tag: &String| {
        let (repository, tag) = tag.rsplit_once(':').unwrap_or((tag, "<none>"));
        let mut row = whole(record);
        row["ID"] = id(record, no_trunc).into();
        row["Repository"] = repository.into();
        row["Tag"] = tag.into();
        row["Digest"] = record.manifest.map(|digest| digest.to_string()).into();
        row["CreatedSince"] = show::ago(record.imported * 1000).into();
        row["CreatedAt"] = exocell_cell::clock::rfc3339_ms(record.imported * 1000).into();
        row["Size"] = show::bytes(record.size_bytes).into();
        row
    };
    tags.iter().map(row).collect()
}

fn id(record: &ImageRecord, no_trunc: bool) -> String {
    let id = record.id.to_string();
    match no_trunc {
        true => id,
        false => id.trim_start_matches("sha256:").chars().take(12).collect(),
    }
}

fn columns(record: &ImageRecord, no_trunc: bool) -> Vec<String> {
    let name = if record.tags.is_empty() { "<none>".to_owned() } else { record.tags.join(", ") };
    let (size, imported) = (show::bytes(record.size_bytes), show::ago(record.imported * 1000));
    vec![name, id(record, no_trunc), size, imported]
}

/// What the image says of itself, and beside it what the store knows.
fn document(store: &Store, name: &str) -> Result<Value, CellError> {
    let text = store.inspect(name)?;
    let mut document: Value = serde_json::from_str(&text).unwrap_or_default();
    if let (Some(fields), Value::Object(own)) =
        (document.as_object_mut(), whole(&store.resolve(name)?))
    {
        for (name, value) in own {
            fields.entry(name).or_insert(value);
        }
    }
    Ok(document)
}

pub fn inspect(store: &Store, args: &ImageInspectArgs) -> Result<(), CellError> {
    let found = args.images.iter().map(|name| document(store, name));
    let found = found.collect::<Result<Vec<_>, _>>()?;
    match &args.format {
        Some(text) => Template::read(text)?.print(&found),
        None => print_json(&found, true),
    }
}

pub fn history(store: &Store, args: &HistoryArgs) -> Result<(), CellError> {
    let document = document(store, &args.image)?;
    let steps: Vec<&Value> = document["history"].as_array().into_iter().flatten().rev().collect();
    if args.json {
        return steps.iter().try_for_each(|step| print_json(step, false));
    }
    let word = |step: &Value, name: &str| step[name].as_str().unwrap_or_default().to_owned();
    let row = |step: &&Value| {
        let by = word(step, "created_by");
        let by = if args.no_trunc { by } else { shortened(&by) };
        vec![word(step, "created"), by, word(step, "comment")]
    };
    let rows: Vec<Vec<String>> = steps.iter().map(row).collect();
    show::table(&["CREATED", "CREATED BY", "COMMENT"], &rows);
    Ok(())
}

fn shortened(text: &str) -> String {
    const SHOWN_MAX: usize = 60;
    match text.char_indices().nth(SHOWN_MAX) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}
