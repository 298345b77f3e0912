# pyright: basic
"""The keys `model.options` of the networks that have any; importable without torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from stampede.settings import Section

_Widths = list[Annotated[int, Field(ge=1)]]


class NoOptions(Section):
    """No options."""


Activation = Literal["prelu", "dice", "relu"]


class AttentionOptions(Section):
    """The unit of fields with `pooling: attention`."""

    hidden: _Widths = Field(
        [64], min_length=1, description="widths of the hidden layers that give an id its weight"
    )
    activation: Activation = Field(
        "prelu",
        description="of the hidden layers; dice has statistics of the ids of the global batch",
    )
    softmax: bool = Field(
        False, description="weights of a history add up to 1; DIN's paper has none"
    )


class AutoIntOptions(Section):
    """Options of AutoInt."""

    layers: int = Field(3, ge=1, description="layers of self-attention")
    heads: int = Field(2, ge=1, description="attention heads of a layer")
    width: int = Field(32, ge=1, description="width of a head")
    deep: bool = Field(False, description="add an MLP of all embeddings (AutoInt+)")


class BSTOptions(Section):
    """Options of BST."""

    layers: int = Field(1, ge=1, description="transformer blocks")
    heads: int = Field(2, ge=1, description="attention heads of a block")
    positions: int = Field(
        51,
        ge=2,
        description="vectors of positions: the target's, then from the most recent id back; older "
        "ids share the last",
    )
    pooling: Literal["mean", "sum", "target"] = Field(
        "mean", description="of the transformer's outputs; target: that of the target alone"
    )


class CrossOptions(Section):
    """Options of cross layers."""

    layers: int = Field(3, ge=1, description="cross layers")
    l2: float = Field(
        1e-5,
        ge=0,
        description="coefficient of ||w||^2 of the cross layers' matrices in the loss; no rule "
        "scales it",
    )


class DCNv2Options(CrossOptions):
    """Options of DCNv2."""

    cross: Literal["mixture", "full"] = Field(
        "mixture",
        description="a mixture of low-rank experts, as in the authors' code, or a matrix of full "
        "rank",
    )
    experts: int = Field(4, ge=1, description="experts of a mixture")
    rank: int = Field(32, ge=1, description="rank of an expert's matrices")


class DESTINEOptions(Section):
    """Options of DESTINE."""

    layers: int = Field(3, ge=1, description="layers of self-attention")
    heads: int = Field(2, ge=1, description="attention heads of a layer")
    width: int = Field(32, ge=1, description="width of a head")
    unary: Literal["mean_query", "field"] = Field(
        "mean_query",
        description="unary term: product of a field's key and the mean query, as in the paper, or "
        "a learned weight of the field's vector, as in FuxiCTR",
    )
    residual_mode: Literal["last_layer", "each_layer", "none"] = Field(
        "last_layer", description="residual of the embeddings after the last layer, or of each one"
    )
    use_scale: bool = Field(
        False, description="divide the pairwise term by the root of a head's width"
    )
    relu: bool = Field(True, description="ReLU after the last layer; FuxiCTR has none")
    att_dropout: float = Field(
        0.0, ge=0, lt=1, description="share of the attention weights that training leaves out"
    )
    deep: bool = Field(False, description="add an MLP of all embeddings")


class DINOptions(Section):
    """Options of DIN."""

    activation: Activation = Field("prelu", description="of the hidden layers")


class DLRMOptions(Section):
    """Options of DLRM."""

    bottom: _Widths = Field(
        [512, 256],
        description="hidden widths of the bottom MLP, which maps the numbers to a vector of "
        "width model.dim",
    )


class FinalMLPOptions(Section):
    """Options of FinalMLP."""

    second: _Widths | None = Field(
        None, min_length=1, description="widths of the second MLP's layers; null: model.hidden"
    )
    heads: int = Field(1, ge=1, description="heads of the bilinear fusion")
    gates: _Widths | None = Field(
        [64], description="widths of the hidden layers of the gates; null: no gates"
    )


class MaskNetOptions(Section):
    """Options of MaskNet."""

    structure: Literal["parallel", "serial"] = Field(
        "parallel",
        description="parallel: blocks side by side below the MLP; serial: one after another in "
        "its place, with the widths model.hidden",
    )
    blocks: int = Field(5, ge=1, description="parallel: number of blocks")
    width: int = Field(64, ge=1, description="parallel: width of a block")
    reduction: float = Field(
        1.0, gt=0, description="width of a mask's hidden layer, relative to the width of the mask"
    )


class SharedBottomOptions(Section):
    """Options of Shared-Bottom."""

    tower: _Widths = Field(
        [64], min_length=1, description="widths of the hidden layers of a goal's own MLP, its tower"
    )


class MMoEOptions(SharedBottomOptions):
    """Options of MMoE."""

    experts: int = Field(
        4, ge=1, description="experts, each an MLP with the hidden layers model.hidden"
    )
    gate: list[Annotated[int, Field(ge=1)]] = Field(
        [], description="widths of the hidden layers of a gate; []: none, as in the papers"
    )


class PLEOptions(SharedBottomOptions):
    """Options of PLE."""

    layers: int = Field(2, ge=1, description="layers of experts; 1: CGC")
    shared_experts: int = Field(
        1, ge=1, description="shared experts of a layer, with the hidden layers model.hidden"
    )
    goal_experts: int = Field(1, ge=1, description="experts of each goal in a layer")
    gate: list[Annotated[int, Field(ge=1)]] = Field(
        [], description="widths of the hidden layers of a gate; []: none, as in the papers"
    )


class WukongOptions(Section):
    """Options of Wukong."""

    layers: int = Field(3, ge=1, description="layers of interactions")
    fmb_features: int = Field(
        16, ge=1, description="vectors that the factorization machine of a layer gives"
    )
    lcb_features: int = Field(
        16, ge=1, description="vectors that the linear compression of a layer gives"
    )
    rank: int | None = Field(
        24,
        ge=1,
        description="columns that the matrix of all pairs is projected to; null: the whole matrix",
    )
    fmb_mlp_units: _Widths = Field(
        [512, 256],
        min_length=1,
        description="widths of the hidden layers of the MLP of a layer's pairs",
    )
    bottom: _Widths | None = Field(
        [512, 256],
        description="widths of the hidden layers of an MLP over the numbers, whose output is one "
        "vector; null: a vector for each number, as in FuxiCTR",
    )


class XDeepFMOptions(Section):
    """Options of xDeepFM."""

    cin: _Widths = Field(
        [128, 128], min_length=1, description="feature maps of the layers of interactions"
    )
