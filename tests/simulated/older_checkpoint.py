"""A checkpoint as the first version of this library with a manager has written it: commit 6571bbc.

It is step 1 of two ranks, of the tensors of :data:`~tests.simulated.training.SHAPES`, in format
version 1. So a simulated job can begin where a job of that version has ended.

Tested in tests/simulation/test_cluster.py.
"""

from __future__ import annotations

import base64
import zlib

STEP = 1
# What its values say.
VERSION = (900 * 10000 + STEP) * 10

_FILES = {
    "0.manifest": (
        "c-ozny>HV%7{={<v{5$(m@7+E2wBnH#de%7Obke<>VgD{f;rpg#EL(HeQA@HN=OJ6DlsD=m5Bug5OW7M#8B}^AR)0;OjQT-UTU>*"
        "n}WhciF1$d`Q3YuFPBGEY0|b8%L*B%F6Gp+l+|s;Nf_mEqO2+d>be25ynv0I{(vj0Vh6F)x9l-zDcr|MGxeqcdP+B##p6DUK-O(W"
        "T+KwfMwv?;&tsTUUDFJLohBj(#(QxRQf_UqB=uwA!60tNN#I(kzr{cxAUHkd^wVJo-O;GmunY~vVdOs^GRt>C6{wW6K@M>JE=##E"
        "V{CX#(_2Ju*c#HPha6(JJVG!cuGu`T0LGrKZs%;mROI0D@jz5^Z!&G#qoUU~J1~#PD)zjTaTwV~s-bnj?fDQ^p3Ry4PQgwt+6_%L"
        "k?=d92XVJ95c&NA2pfN|!$fM!m<Hv}DTMiVLd#I$nNB0bn&u&ZUB#Fb5CJ^tl+%RI1;Rwd1kC`&gSj{a0mq!?bc5KYft8ysL#bpI"
        "%v7;f2&m7-bCsh(K6)Xa$o0dy5IQ7d6q1>-S^m8i1A=K5_De#e{#=zbVZWG#IQ}P8Q&R~-7dCG3M>vhaGim{XO0ao;?_LgR%z|L3"
        "P&dv!-^&>-Z3aU()P@er*;y9t;obM~?!m3ipBtZ)56An*2fOi`y%ln_^P+a;*E{3ptHUQh)?Od3{XTfP^tJMQukrop{{FQuTi2gG"
        "_;!0G{ajl(Ij5!k+N<2Cu2<hy#r0|Rqd3Lo{4L4QvP{adr7W9#T+OoDf?QoJ%e~sdV!2$B*Cn}BmP*x1NrqRcB<FOgBAqqCspP&&"
        "?rST4#KlpztPJ6ssdU;3vQRyx9^))Z<0KXL@Hq)a1$4}k`X=+cJuZfv^lhI`3}GCyXri+bPpCL3IIBBx7{dR;IW?pa?XpD3oZ4_O"
        "b^ZVz@EEx"
    ),
    "0_0.safetensors": (
        "c-obeOK+P%5XXt_y!uX`SF~po0S3qQH|Vue)k9)!*D%<~z`C#`aV?}Adg$lqC+#eZEk9M6%g;MA|MB1BS$=ek`dKi}Q&1ulN^s5w"
        "3s#7G;7U#*V*}=ozzw~=?Rx@35kwI<LinE7bDiMEc5P;{Nam?fSQ{nq7))ns7324i7qQfR91NCO{Idiehj`Y)2bm`!FXCT-0T%;>"
        "f*I8o6Oo4n9u{{j5p&3|A0Qr2)Eyg`7@ERdf7;Gj7zx#U22C=~RL^Uo<3x@`!m(|WyzN_NZ@89`QB*+P{?@ikyG|uC*wA=OO_T_w"
        "AcK(SA{*DqtW1*1S~(iUqS)`X$sFO-KV);SNB_SDQ<*}xGstE12xB*v**$iIE6pB<TIJZo+9W)xT<}5(1=oR0Q<-fW-dC|@zC`!^"
        "1LhsuJ8G`W`a_egSY>T&qrOVD7hK{mJ+IkmeZn=uEn@YBYrYou9Dlp>*&VKW=q)+i!Qa)R+H$*fhvu(5ti~Dd$Wdx_om##-*!5Q5"
        "`Wv0R-B#Gf@|@nVs!V*0r@vpnpBTmou|;eXJH%7s8S$KWLA)eBBR(g-AigBNBEBZRAzl&R65kQu6F(3?5<d}*-{hazBDRSgqVb37"
        "h%I89*dd-0&xq&53*sel!B#I%)3Hpw7P3_O4s5(PO$V<Fy*Qh?oEO0a!ZLxJc2gJNGOwRgnQQT)s{R4**3Ul"
    ),
    "1_0.safetensors": (
        "c-obeOOMkq5XZZ)TzJ0@ya@)Dmnli=v}wNqS0u!ty9#bH=|;_?B<}8(DiTKyd<s4(<7Bq#whdB!`Pno6PyTYo{=VO;#)5fX0!ju_"
        "NzY@01uNtUcq*Gf$_C6CfgK3fbcBRJ`e6u`l#UQx+wyy+Z8FZnEKj7uy<rSz{$#3_G4BNOBFc0f3xl&X`Y{793UIB3r&%5cUJ?BS"
        "4A>Yb6ijJvaV+zoz{TQ_#c~dL`xK(_u{vY}149#->)CpaV<b@XDb&d*Rb5d>$8k22v4>^r<k00t_h==Pg<%0z`Jv#3S*7C4zn~H4"
        "nlP41K?;GF%XC~N(^(vsI+tV#q#HiZqdPe4aii1V&}?$J)NFA$v`}VSN0mz@M=`9Mq~H!7J6Lg7k4w$}P7%&jF1<oY1?@zpat!&p"
        "+pSyHywA|Q+tdMOlk=^%X?v6Dl9l{IH|ncYIl(6W+!b|C>lL;Ub`h&CT>Vw-b387qZ{xqAPH9$K)}|Px+(v^aul`}Py2I^FIZAoQ"
        "cC~!Vp{^GD>aNt%C$e4&%Wz?0snV#&gI|BYeA{ca9uglB9}}MtpAw%DpA!w@3nC-FB)%fPCLR#q5Z@Bt5#JL(5ION9u}%C$y!yN5"
        "HR5&R4dPAWE#htB9pYW$J>q?0>rc%+;w9o`;y&>Talw|4sbO)0-pXpKq6GA`*LUz;c3jc!^exfv;}gg5Y0o3S&{qdLy3iBHY@22I"
        "4>M`UfB"
    ),
}


def files() -> dict[str, bytes]:
    """Return its files, by name."""
    return {name: zlib.decompress(base64.b85decode(text)) for name, text in _FILES.items()}
