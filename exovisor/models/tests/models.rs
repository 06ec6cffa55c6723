//! Models that are run, and models that are refused.

mod onnx;

use exocell_models::{Element, Ended, Form, Model, ModelError};
use onnx::{F32, I64, bytes, floats, int, ints, layer, model, node, tensor, value};
use proptest::prelude::*;

fn refused(bytes: &[u8]) -> ModelError {
    Model::read(bytes).expect_err("it is refused")
}

fn refused_words(bytes: &[u8], words: &str) {
    let error = refused(bytes).to_string();
    assert!(error.contains(words), "{error}");
}

/// `y = op(x)` for a square `x`.
fn unary(operator: &str, dims: &[u64], attributes: &[Vec<u8>]) -> Vec<u8> {
    let nodes = [node(operator, &["x"], "y", attributes)];
    model(&nodes, &[], &[value("x", F32, dims)], &[value("y", F32, &[])])
}

#[test]
fn a_model_is_computed() {
    let model = Model::read(&layer()).unwrap();
    assert_eq!(model.inputs(), [Form { dims: vec![1, 2], element: Element::F32 }]);
    assert_eq!(model.outputs(), [Form { dims: vec![1, 3], element: Element::F32 }]);
    let run = |x: [f32; 2]| model.run(&[floats(&x)], || false).unwrap();
    assert_eq!(run([1.0, 2.0]), [floats(&[2.25, 0.0, 6.0])]);
    assert_eq!(run([-1.0, 0.0]), [floats(&[0.0, 0.0, 4.0])]);
    for wrong in [vec![], vec![floats(&[1.0])], vec![floats(&[1.0; 2]); 2]] {
        assert_eq!(model.run(&wrong, || false), Err(Ended::Inputs));
    }
    assert_eq!(model.run(&[floats(&[1.0; 2])], || true), Err(Ended::Stopped));
}

#[test]
fn a_picture_goes_through_convolutions() {
    let kernel = tensor("k", F32, &[1, 1, 3, 3], &floats(&[1.0; 9]));
    let shape = tensor("s", I64, &[2], &[1i64, -1].map(i64::to_le_bytes).concat());
    let nodes = [
        node("Conv", &["x", "k"], "c", &[ints("pads", &[1, 1, 1, 1])]),
        node(
            "Constant",
            &[],
            "two",
            &[[bytes(1, "value"), bytes(5, tensor("", F32, &[1], &floats(&[2.0]))), int(20, 4)]
                .concat()],
        ),
        node("Mul", &["c", "two"], "m", &[]),
        node("Reshape", &["m", "s"], "y", &[]),
    ];
    let bytes = model(
        &nodes,
        &[kernel, shape],
        &[value("x", F32, &[1, 1, 3, 3])],
        &[value("y", F32, &[1, 9])],
    );
    let model = Model::read(&bytes).unwrap();
    let y = model.run(&[floats(&[1.0; 9])], || false).unwrap();
    let corners = [8.0, 12.0, 8.0, 12.0, 18.0, 12.0, 8.0, 12.0, 8.0];
    assert_eq!(y, [floats(&corners)]);
}

#[test]
fn what_would_take_too_much_is_refused_before_it_does() {
    // 40 GB of sums from a file of 800 KB, of constants alone and of an input.
    let column = tensor("a", F32, &[100_000, 1], &vec![0; 400_000]);
    let row = tensor("b", F32, &[1, 100_000], &vec![0; 400_000]);
    let sum = [node("Add", &["a", "b"], "y", &[])];
    let too_large = |bytes: &[u8], what: &str| match refused(bytes) {
        ModelError::TooLarge { what: found, .. } if found == what => {}
        error => panic!("{error}"),
    };
    let y = [value("y", F32, &[])];
    too_large(
        &model(&sum, &[column.clone(), row], &[value("x", F32, &[1])], &y),
        "bytes of all values",
    );
    let input = value("b", F32, &[1, 100_000]);
    too_large(&model(&sum, &[column], &[input], &y), "bytes of all values");
    let product = [node("MatMul", &["x", "x"], "y", &[])];
    let square = |size| model(&product, &[], &[value("x", F32, &[size, size])], &y);
    too_large(&square(4000), "multiplications");
    assert!(Model::read(&square(40)).is_ok());
    too_large(&unary("Relu", &[1 << 40], &[]), "numbers of a tensor");
    too_large(&unary("Relu", &[1 << 20, 1 << 20], &[]), "numbers of a tensor");
    too_large(&unary("Relu", &[1; 9], &[]), "dimensions of a tensor");
    too_large(&vec![0; (64 << 20) + 1], "bytes");
    let many = vec![node("Relu", &["x"], "y", &[]); 10_001];
    too_large(&model(&many, &[], &[value("x", F32, &[1])], &y), "nodes");
}

#[test]
fn what_is_not_offered_is_named() {
    let x = [value("x", F32, &[4])];
    let y = [value("y", F32, &[])];
    refused_words(&unary("ConstantOfShape", &[4], &[]), "`ConstantOfShape`");
    refused_words(&unary("Loop", &[4], &[]), "`Loop`");
    refused_words(&unary("Relu", &[0, 4], &[]), "without a fixed shape");
    refused_words(&unary("Softmax", &[4], &[ints("axis", &[1 << 40])]), "beyond 65,536");
    let shape = model(&[node("Reshape", &["x", "x"], "y", &[])], &[], &x, &y);
    refused_words(&shape, "depends on data");
    refused_words(&model(&[node("Relu", &["z"], "y", &[])], &[], &x, &y), "`z`");
    refused_words(&model(&[], &[], &x, &y), "never makes its output `y`");
    let short = tensor("w", F32, &[4], &floats(&[1.0; 3]));
    let add = [node("Add", &["x", "w"], "y", &[])];
    refused_words(&model(&add, &[short], &x, &y), "another length");
    // A file of the host, by name.
    let outside = [
        tensor("w", F32, &[4], &[]),
        bytes(13, [bytes(1, "location"), bytes(2, "/etc/passwd")].concat()),
        int(14, 1),
    ]
    .concat();
    refused_words(&model(&add, &[outside], &x, &y), "in another file");
    refused_words(b"garbage", "not an ONNX model");
}

#[test]
fn no_part_of_a_model_is_a_model() {
    let whole = layer();
    for length in 0..whole.len() {
        // What is left of it may be a smaller model; it is never a panic.
        let _ = Model::read(&whole[..length]);
    }
    assert!(Model::read(&[]).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, ..ProptestConfig::default() })]
    #[test]
    fn no_damaged_model_takes_the_process(at in 0usize..1_000, byte: u8, other in 0usize..1_000, more: u8) {
        let mut bytes = layer();
        let length = bytes.len();
        bytes[at % length] = byte;
        bytes[other % length] ^= more;
        if let Ok(model) = Model::read(&bytes) {
            let inputs: Vec<Vec<u8>> = model.inputs().iter().map(|form| vec![0; form.bytes()]).collect();
            let _ = model.run(&inputs, || false);
        }
    }
}
